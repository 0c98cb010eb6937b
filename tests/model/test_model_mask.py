import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modicum.model import Decoder, ModelConfig
from modicum.model.mask import Visibility, open_blind_rows, places, visible_or_zero

CPU = torch.device("cpu")

rows = st.integers(1, 12).flatmap(
    lambda length: st.tuples(
        st.lists(st.integers(-1, 2), min_size=length, max_size=length),
        st.lists(st.booleans(), min_size=length, max_size=length),
        st.integers(0, length - 1),
    )
)


def brute_force(documents: list[int], keep: list[bool], past: int) -> torch.Tensor:
    table = [
        [k <= q and keep[k] and documents[k] == documents[q] and documents[q] != -1 for k in range(len(keep))]
        for q in range(past, len(keep))
    ]
    return torch.tensor(table)


@given(rows)
def test_causality_padding_and_documents_compose_as_their_definitions_say(row):
    documents, keep, past = row
    numbers = torch.tensor([documents], dtype=torch.int32)
    length = len(keep) - past
    seen = Visibility(past, length, torch.tensor([keep]), numbers[:, past:], numbers)
    whole = brute_force(documents, keep, past)
    assert torch.equal(seen.allowed(0, length, CPU)[0, 0], whole)
    for start in range(length):  # every block is the same square's part
        for stop in range(start + 1, length + 1):
            assert torch.equal(seen.allowed(start, stop, CPU)[0, 0], whole[start:stop, : past + stop])


@given(rows)
def test_a_position_is_the_count_of_what_the_token_sees_before_itself(row):
    documents, keep, _ = row
    numbers = torch.tensor([documents], dtype=torch.int32)
    allowed = Visibility(0, len(keep), torch.tensor([keep]), numbers, numbers).allowed(0, len(keep), CPU)
    for place, seen in zip(places(allowed)[0].tolist(), brute_force(documents, keep, 0).tolist(), strict=True):
        assert place == max(sum(seen) - 1, 0)


def test_positions_of_left_padded_and_packed_rows():
    keep = torch.tensor([[False, False, True, True, True]])
    assert places(Visibility(0, 5, keep).allowed(0, 5, CPU)).tolist() == [[0, 0, 0, 1, 2]]
    packed = torch.tensor([[0, 0, 1, 1, 1, -1]])
    assert places(Visibility(0, 6, None, packed, packed).allowed(0, 6, CPU)).tolist() == [[0, 1, 0, 1, 2, 0]]


def test_what_sees_nothing_becomes_zero_and_its_gradient_too():
    mask, seeing = open_blind_rows(torch.tensor([[[[True, False], [False, False]]]]))
    assert mask.tolist() == [[[[True, False], [True, True]]]]
    out = torch.ones(1, 3, 2, 4, requires_grad=True)
    kept = visible_or_zero(out, seeing)
    kept.sum().backward()
    assert kept[:, :, 0].eq(1).all()
    assert kept[:, :, 1].eq(0).all()
    assert out.grad[:, :, 1].eq(0).all()


CONFIG = ModelConfig(
    vocab_size=96,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    qk_norm=True,
)


@settings(max_examples=40, deadline=None)
@given(rows, st.sampled_from(["sdpa", "blocks", "weights"]))
def test_no_mask_whatever_gives_nan_forward_or_backward(row, kind):
    documents, keep, _ = row
    model = Decoder(CONFIG)
    model.attention_impl, model.attention_block = ("sdpa" if kind == "weights" else kind), 4
    out = model(
        torch.arange(len(keep))[None],
        documents=torch.tensor([documents], dtype=torch.int32),
        attention_mask=torch.tensor([keep]),
        return_attention=kind == "weights",
    )
    logits = out[0] if kind == "weights" else out
    logits.square().sum().backward()
    assert torch.isfinite(logits).all()
    assert all(torch.isfinite(weight.grad).all() for weight in model.parameters())


def test_a_row_of_only_padding_attends_to_nothing(tiny, lively, some_ids):
    model, ids = lively(tiny(num_hidden_layers=1)), some_ids(1, 6)
    for impl in ("sdpa", "blocks"):
        model.attention_impl = impl
        alone = model.hidden(ids, attention_mask=torch.zeros(1, 6))
        block = model.model.layers[0]
        x = model.embed(ids)  # attention adds zero, so the residual stream is the feed-forward's alone
        torch.testing.assert_close(alone, model.model.norm(x + block.mlp(block.post_attention_layernorm(x))))
