"""The loader of conversations: every example once an epoch, and a resume that neither skips nor repeats."""

import itertools
import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tune_chats import INSTRUCT, conversation

from modicum.data import Loader
from modicum.store import UserError
from modicum.tune import ConversationRows, Example, collect, load_conversations

PAD = 0


def numbered(lengths):
    """Examples whose every token is different, so that each can be found again."""
    starts = np.cumsum([1, *lengths])
    parts = zip(starts, lengths, strict=False)
    return collect(
        [
            Example(conversation("a", "b"), list(range(start, start + length)), [False] + [True] * (length - 1))
            for start, length in parts
        ]
    )


LENGTHS = [3, 9, 5, 4, 4, 7, 2, 8, 6, 5, 3, 10, 2, 4, 6, 9, 9, 3]


def loader(examples=None, **options):
    options = {"sequence_length": 10, "batch_size": 2, "seed": 3, "pad_id": PAD, **options}
    of_loader = {
        name: options.pop(name) for name in ("batch_size", "rank", "world_size", "prefetch") if name in options
    }
    return Loader(ConversationRows(numbered(LENGTHS) if examples is None else examples, **options), **of_loader)


def take(iterator, count):
    return [batch.ids.tolist() for batch in itertools.islice(iterator, count)]


def documents_of(batch):
    """Every conversation in a batch, as a tuple of its ids."""
    found = []
    for ids, documents in zip(batch.ids.tolist(), batch.documents.tolist(), strict=True):
        last = documents[-1] if ids[-1] != PAD else -1
        numbers = [*documents, last]
        for number in range(max(numbers) + 1):
            found.append(tuple(token for token, owner in zip(ids, numbers, strict=True) if owner == number))
    return found


@given(st.lists(st.integers(2, 11), min_size=1, max_size=40), st.integers(0, 2**32 - 1))
def test_the_rows_of_each_epoch_contain_every_example_exactly_once_and_unchanged(lengths, seed):
    examples = numbered(lengths)
    expected = sorted(tuple(ids.tolist()) for ids, _ in examples)
    with loader(examples, batch_size=1, seed=seed) as batches:
        for _ in range(3):
            epoch = [next(batches) for _ in range(batches.rows.rows_per_epoch)]
            assert sorted(document for batch in epoch for document in documents_of(batch)) == expected
            assert sum(batch.supervised_tokens for batch in epoch) == examples.supervised_tokens


def test_each_epoch_has_another_order():
    with loader(batch_size=1) as batches:
        orders = [take(batches, batches.rows.rows_per_epoch) for _ in range(3)]
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_resume_is_exact_from_every_batch_of_two_epochs():
    with loader() as batches:
        count = 2 * batches.rows.rows_per_epoch // 2 + 2
        whole = take(batches, count)
    for done in range(count):
        with loader() as before, loader() as after:
            take(before, done)
            after.load_state_dict(json.loads(json.dumps(before.state_dict())))
            assert take(after, count - done) == whole[done:]


def test_a_loader_that_has_run_ahead_can_be_set_back():
    with loader() as batches:
        start = batches.state_dict()
        first = take(batches, 3)
        batches.load_state_dict(start)
        assert take(batches, 3) == first


def test_resume_in_the_midst_of_an_accumulation_hands_out_the_unused_rows_first():
    with loader(batch_size=4) as before, loader(batch_size=4) as after:
        take(before, 2)
        newest = next(before)
        after.load_state_dict(before.state_dict(unused_rows=3))
        assert next(after).ids.tolist() == newest.ids[1:].tolist()
        assert next(after).ids.tolist() == next(before).ids.tolist()
        with pytest.raises(ValueError, match="newest batch has 4"):
            before.state_dict(unused_rows=5)


def test_batches_made_ahead_do_not_count_as_handed_out():
    with loader(prefetch=8) as batches:
        next(batches)
        assert batches.state_dict()["rows"] == 2


def test_the_state_is_a_few_integers():
    state = loader().state_dict()
    assert all(type(value) is int for value in state.values())
    assert len(state) < 8


def test_the_order_does_not_depend_on_the_number_of_ranks():
    with loader(batch_size=4) as alone:
        whole = [row for batch in take(alone, 6) for row in batch]
    ranks = [loader(batch_size=4, rank=rank, world_size=2) for rank in range(2)]
    shared = [row for _ in range(6) for rank in ranks for row in next(rank).ids.tolist()]
    for rank in ranks:
        rank.close()
    assert shared == whole


@pytest.mark.parametrize("change", [{"seed": 4}, {"sequence_length": 11}, {"separate_documents": False}])
def test_a_state_of_another_order_is_refused(change):
    with pytest.raises(UserError, match="other conversations"):
        loader(**change).load_state_dict(loader().state_dict())


def test_a_state_of_other_conversations_is_refused():
    with pytest.raises(UserError, match="other conversations"):
        loader(numbered(LENGTHS[:-1])).load_state_dict(loader().state_dict())


def test_ranks_may_change_between_updates_but_not_within_one():
    with loader(batch_size=4, world_size=2) as two:
        next(two)
        between, within = two.state_dict(), two.state_dict(unused_rows=1)
    with loader(batch_size=4) as one, loader(batch_size=4) as whole:
        one.load_state_dict(between)
        assert take(one, 1) == take(whole, 2)[1:]
        with pytest.raises(UserError, match="within an update of 4 sequences on 2 ranks"):
            one.load_state_dict(within)


def test_separation_is_a_switch():
    with loader(separate_documents=False) as batches:
        batch = next(batches)
    assert batch.positions.tolist() == [list(range(10))] * 2
    assert set(batch.documents.flatten().tolist()) <= {0, -1}


def test_epochs_and_rows_are_each_others_reverse():
    batches = loader()
    assert batches.rows.rows_for(2) == 2 * batches.rows.rows_per_epoch
    assert batches.rows.rows_for(0.1) == -(-batches.rows.rows_per_epoch // 10)
    assert batches.epochs(3 * batches.rows.rows_per_epoch) == {"conversations": 3}
    batches.check(10**9)


def test_no_examples_and_impossible_shares_are_refused():
    with pytest.raises(UserError, match="no conversation to train on"):
        loader(numbered([]))
    with pytest.raises(UserError, match="batch_size 3 cannot be shared by 2 ranks"):
        loader(batch_size=3, world_size=2)
    with pytest.raises(ValueError, match="rank 2 of 2"):
        loader(rank=2, world_size=2)


def test_less_than_a_twentieth_of_the_shipped_conversations_rows_is_padding(tokenizer):
    split = load_conversations([INSTRUCT], tokenizer, sequence_length=512, heldout_fraction=0.05, seed=0)
    assert split.report.read == 6019
    with loader(split.train, sequence_length=512, batch_size=16, pad_id=tokenizer.pad_id) as batches:
        epoch = [next(batches) for _ in range(batches.rows.rows_per_epoch // 16)]
    padding = torch.cat([batch.documents for batch in epoch]) == -1
    assert batches.rows.padding_share < 0.05
    assert float(padding.float().mean()) == pytest.approx(batches.rows.padding_share, abs=0.01)
