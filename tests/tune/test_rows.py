"""Packed rows: laid out by hand, and equal to each conversation alone."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy
from tune_chats import conversation

from modicum.model import Decoder, ModelConfig
from modicum.tune import Example, collect, make_example, packed_batch, packed_batches
from modicum.tune.packing import Packing

PAD = 1


def examples_of(*parts):
    """Examples from (ids, supervised) pairs."""
    return collect([Example(conversation("a", "b"), list(ids), list(flags)) for ids, flags in parts])


def test_a_row_laid_out_by_hand():
    examples = examples_of(([5, 6, 7], [0, 0, 1]), ([8, 9], [0, 1]))
    batch = packed_batch(examples, [[1, 0], [0]], sequence_length=6, pad_id=PAD)
    assert batch.ids.tolist() == [[8, 9, 5, 6, 7, PAD, PAD], [5, 6, 7, PAD, PAD, PAD, PAD]]
    assert batch.positions.tolist() == [[0, 1, 0, 1, 2, 0], [0, 1, 2, 0, 0, 0]]
    assert batch.documents.tolist() == [[0, 0, 1, 1, 1, -1], [0, 0, 0, -1, -1, -1]]
    assert batch.supervised.int().tolist() == [[0, 1, 0, 0, 1, 0, 0], [0, 0, 1, 0, 0, 0, 0]]
    assert (batch.ids.dtype, batch.positions.dtype) == (torch.int64, torch.int64)
    assert (batch.documents.dtype, batch.supervised.dtype) == (torch.int32, torch.bool)


def test_the_last_of_one_more_token_than_inputs_is_a_target_only():
    batch = packed_batch(examples_of(([5, 6, 7], [0, 1, 1])), [[0]], sequence_length=2, pad_id=PAD)
    assert batch.ids.tolist() == [[5, 6, 7]]
    assert batch.documents.tolist() == [[0, 0]]
    assert batch.supervised.tolist() == [[False, True, True]]


def test_without_separation_a_row_is_one_document_and_padding_still_none():
    examples = examples_of(([5, 6, 7], [0, 0, 1]), ([8, 9], [0, 1]))
    batch = packed_batch(examples, [[0, 1]], sequence_length=6, pad_id=PAD, separate_documents=False)
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 5]]
    assert batch.documents.tolist() == [[0, 0, 0, 0, 0, -1]]


def test_rows_of_padding_supervise_nothing_and_belong_to_no_document():
    batch = packed_batch(examples_of(([5, 6], [0, 1])), [[0]], sequence_length=3, pad_id=PAD, pad_rows_to=3)
    assert batch.rows == 3
    assert (batch.ids[1:] == PAD).all()
    assert (batch.documents[1:] == -1).all()
    assert batch.supervised_tokens == 1


def test_a_row_that_is_too_long_is_refused():
    with pytest.raises(ValueError, match="4 tokens in a row of 3"):
        packed_batch(examples_of(([5, 6], [0, 1]), ([7, 8], [0, 1])), [[0, 1]], sequence_length=2, pad_id=PAD)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(9, 20))
def test_no_target_stands_in_another_conversation_than_its_input(lengths, sequence_length):
    everything = [(range(10, 10 + length), [True] * length) for length in lengths]  # first tokens claim to be targets
    for batch in packed_batches(examples_of(*everything), sequence_length, pad_id=PAD):
        documents = torch.cat([batch.documents, torch.full((batch.rows, 1), -2)], dim=1)
        documents[:, -1] = torch.where(batch.ids[:, -1] == PAD, -1, documents[:, -2])
        rows, places = torch.nonzero(batch.supervised, as_tuple=True)
        continues = batch.ids[rows, places] == batch.ids[rows, places - 1] + 1
        assert (places > 0).all()
        assert continues.all()
        assert (documents[rows, places - 1] >= 0).all()
        assert batch.supervised_tokens == int((batch.ids > 10).sum())


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.integers(1, 5))
def test_heldout_batches_hold_every_example_once_in_rows_of_one_shape(lengths, batch_size):
    parts, first = [], 10
    for length in lengths:
        parts.append((range(first, first + length), [False] + [True] * (length - 1)))
        first += length
    batches = list(packed_batches(examples_of(*parts), 10, pad_id=PAD, batch_size=batch_size))
    tokens = torch.cat([batch.ids.flatten() for batch in batches])
    assert sorted(tokens[tokens >= 10].tolist()) == list(range(10, first))
    assert len({batch.ids.shape for batch in batches}) == 1


def test_heldout_batches_are_the_same_every_time_and_keep_to_their_budget():
    examples = examples_of(*[([n + 10] * (n % 5 + 2), [False] + [True] * (n % 5 + 1)) for n in range(40)])
    first, again = (list(packed_batches(examples, 8, 24, pad_id=PAD, batch_size=2)) for _ in range(2))
    assert [batch.ids.tolist() for batch in first] == [batch.ids.tolist() for batch in again]
    assert [batch.rows for batch in first] == [2, 2]
    assert int((torch.cat([batch.documents for batch in first])[:, 0] >= 0).sum()) == 3
    assert len(list(packed_batches(examples, 8, 1, pad_id=PAD))) == 1
    assert list(packed_batches(examples_of(), 8, pad_id=PAD)) == []


@pytest.fixture(scope="module")
def model() -> Decoder:
    config = ModelConfig(
        vocab_size=1024,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=128,
        max_position_embeddings=256,
        rope_theta=10_000.0,
        initializer_range=0.2,
    )
    return Decoder(config).eval()


def losses(model, batch):
    """The loss of every target, (B, T)."""
    with torch.no_grad():
        logits = model(batch.ids[:, :-1], positions=batch.positions, documents=batch.documents)
    return cross_entropy(logits.transpose(1, 2), batch.ids[:, 1:], reduction="none")


@pytest.mark.parametrize("implementation", ["sdpa", "blocks"])
def test_packed_conversations_lose_what_each_loses_alone(model, tokenizer, implementation):
    chats = [
        conversation("What is a port?", "A number that names a service."),
        conversation("Hello!", "Hi.", "What are you?", "A small model."),
        conversation("Explain <|im_end|> to me.", "It ends a turn.", system="Be brief."),
        conversation("Why?", "Because it was so from the beginning, and nobody asked."),
    ]
    examples = collect([make_example(chat, tokenizer) for chat in chats])
    packing = Packing(examples.lengths, 129)
    plan = packing.epoch(0, 0)
    rows = [plan.row(number) for number in range(packing.rows)]
    assert max(len(row) for row in rows) > 1
    model.attention_impl = implementation
    packed = packed_batch(examples, rows, sequence_length=128, pad_id=tokenizer.pad_id)
    together = losses(model, packed)
    model.attention_impl = "sdpa"
    compared = 0
    for row, members in enumerate(rows):
        begin = 0
        for member in members:
            ids, flags = examples[member]
            alone_batch = packed_batch(examples, [[member]], sequence_length=len(ids) - 1, pad_id=tokenizer.pad_id)
            alone = losses(model, alone_batch)[0]
            span = slice(begin, begin + len(ids) - 1)
            torch.testing.assert_close(together[row, span], alone, atol=1e-5, rtol=0)
            assert np.array_equal(packed.supervised[row, begin + 1 : begin + len(ids)].numpy(), flags[1:])
            compared += len(alone)
            begin += len(ids)
    assert compared == int(examples.lengths.sum()) - len(examples)
