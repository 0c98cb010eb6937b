"""Padded and packed rows give what the unpadded rows give alone."""

import pytest
import torch
from dialect_models import config, lively, some_hidden, some_ids, whole

from modicum.dialects import cyberslm, slm
from modicum.store import UserError

LENGTHS = (12, 7, 3)


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def padded(side):
    """Rows of three lengths in one batch of 12, what is real in it, and the rows alone."""
    ids, keep = some_ids(3, 12, seed=9), torch.zeros(3, 12, dtype=torch.bool)
    for row, length in enumerate(LENGTHS):
        keep[row, slice(12 - length, None) if side == "left" else slice(length)] = True
    return ids, keep, [ids[row : row + 1, keep[row]] for row in range(3)]


def positions_of(keep):
    return (keep.long().cumsum(1) - 1).clamp(min=0)


@pytest.mark.parametrize("side", ["left", "right"])
def test_cyberslm_padding_changes_no_kept_row(side):
    model = lively(whole("cyberslm"))
    ids, keep, alone = padded(side)
    logits = model(ids, keep)
    for row, part in enumerate(alone):
        close(logits[row, keep[row]], model(part)[0])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["bool", "added"])
def test_slm_padding_changes_no_kept_row(side, kind):
    model = lively(whole("slm"))
    ids, keep, alone = padded(side)
    mask = keep[:, None, None]
    if kind == "added":
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    logits = model(ids, positions_of(keep), mask)
    for row, part in enumerate(alone):
        close(logits[row, keep[row]], model(part)[0])


def test_core_rows_padded_on_the_right_are_as_they_are_alone():
    model = lively(whole("core"))
    ids, keep, alone = padded("right")
    logits = model(ids)
    for row, part in enumerate(alone):
        close(logits[row, keep[row]], model(part)[0])


def test_slm_packed_rows_are_as_they_are_alone():
    model = lively(whole("slm"))
    parts = [some_ids(1, length, seed=length) for length in LENGTHS]
    document = torch.repeat_interleave(torch.arange(3), torch.tensor(LENGTHS))
    places = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    mask = (document[:, None] == document)[None, None]
    packed = model(torch.cat(parts, dim=1), places, mask)
    for ours, part in zip(packed[0].split(LENGTHS), parts, strict=True):
        close(ours, model(part)[0])


def test_slm_cache_position_ids_and_mask_together_give_the_rows_alone():
    """Left-padded prompts, then three tokens, one and two at a time, each row at its own positions."""
    model = lively(whole("slm"))
    ids, keep, _ = padded("left")
    more = some_ids(3, 3, seed=11)
    every = torch.cat([keep, torch.ones(3, 3, dtype=torch.bool)], dim=1)
    places, cache, outs = positions_of(every), slm.KVCache(), []
    for start, stop in ((0, 12), (12, 13), (13, 15)):
        tokens = torch.cat([ids, more], dim=1)[:, start:stop]
        mask = every[:, None, None, :stop]
        outs.append(model(tokens, places[:, start:stop], mask, cache, True)[0])
    ours = torch.cat(outs, dim=1)
    for row in range(3):
        alone = torch.cat([ids[row, keep[row]], more[row]])[None]
        close(ours[row, every[row]], model(alone)[0])


def test_slm_rows_padded_on_the_right_go_on_behind_their_padding():
    model = lively(whole("slm"))
    ids, keep, _ = padded("right")
    more = some_ids(3, 2, seed=11)
    every = torch.cat([keep, torch.ones(3, 2, dtype=torch.bool)], dim=1)
    places = positions_of(every)
    _, cache = model(ids, places[:, :12], keep[:, None, None], use_cache=True)
    logits, _ = model(more, places[:, 12:], every[:, None, None], cache, True)
    for row in range(3):
        alone = torch.cat([ids[row, keep[row]], more[row]])[None]
        close(logits[row], model(alone)[0, -2:])


def test_slm_packed_documents_go_on_in_a_cache():
    """Two documents in one row; each goes on in turn, at its own positions and seeing only its own."""
    model = lively(whole("slm"))
    one, two, ends = some_ids(1, 6, seed=1), some_ids(1, 4, seed=2), some_ids(1, 2, seed=3)
    document = torch.tensor([0] * 6 + [1] * 4 + [0, 1])
    places = torch.tensor([[*range(6), *range(4), 6, 4]])
    mask = (document[:, None] == document)[None, None]
    cache = slm.KVCache()
    model(torch.cat([one, two], dim=1), places[:, :10], mask[..., :10, :10], cache, True)
    logits, _ = model(ends, places[:, 10:], mask[..., 10:, :], cache, True)
    close(logits[0, 0], model(torch.cat([one, ends[:, :1]], dim=1))[0, -1])
    close(logits[0, 1], model(torch.cat([two, ends[:, 1:]], dim=1))[0, -1])


@pytest.mark.parametrize("over", ["past and new", "new"])
def test_cyberslm_mask_and_cache_together_give_the_rows_alone(over):
    model = lively(whole("cyberslm"))
    ids, keep, _ = padded("left")
    more = some_ids(3, 3, seed=11)
    if over == "new":  # all that is cached is then kept
        keep = torch.ones_like(keep)
    _, cache = model(ids, keep, use_cache=True)
    outs, every = [], keep
    for at in range(3):
        every = torch.cat([every, torch.ones(3, 1, dtype=torch.bool)], dim=1)
        mask = every if over == "past and new" else every[:, -1:]
        logits, cache = model(more[:, at : at + 1], mask, cache, True)
        outs.append(logits)
    for row in range(3):
        alone = torch.cat([ids[row, keep[row]], more[row]])[None]
        close(torch.cat(outs, dim=1)[row], model(alone)[0, -3:])


@pytest.mark.parametrize("cached", [False, True])
def test_cyberslm_attention_weights_are_shares_over_the_kept_and_earlier_keys(cached):
    block = lively(cyberslm.DecoderBlock(config("cyberslm")))
    x, keep = some_hidden(2, 9), torch.ones(2, 9, dtype=torch.long)
    keep[1, :3] = 0
    past = 5 if cached else 0
    present = block(x[:, :past], keep[:, :past], use_cache=True)[2] if cached else None
    out, weights, _ = block(x[:, past:], keep, return_attn_weights=True, kv_cache=present)
    assert weights.shape == (2, 3, 9 - past, 9)
    sums = weights.sum(-1)
    torch.testing.assert_close(sums[0], torch.ones(3, 9 - past))
    torch.testing.assert_close(sums[1], keep[1, past:].float().expand(3, 9 - past))
    assert weights[1, :, :, :3].eq(0).all()
    assert weights.triu(past + 1).eq(0).all()
    assert weights[0].tril(past).gt(0).sum() == 3 * sum(range(past + 1, 10))
    close(out, block(x[:, past:], keep, kv_cache=present)[0])


def test_masks_that_fit_not_are_refused():
    block = lively(cyberslm.DecoderBlock(config("cyberslm")))
    with pytest.raises(ValueError, match=r"attention_mask \(2, 4\) fits neither 9 nor 9 tokens"):
        block(some_hidden(2, 9), torch.ones(2, 4))
    with pytest.raises(ValueError, match="1 for keep and 0 for pad; this one holds other numbers"):
        block(some_hidden(2, 9), torch.zeros(2, 9).masked_fill(torch.arange(9) < 3, -torch.inf))
    for other in (torch.full((2, 9), 2), torch.tensor([[-10_000] * 3 + [0] * 6] * 2), torch.full((2, 9), torch.nan)):
        with pytest.raises(ValueError, match="1 for keep and 0 for pad; this one holds other numbers"):
            block(some_hidden(2, 9), other)
    with pytest.raises(ValueError, match="this one is 0 throughout, as one that is added to the scores"):
        block(some_hidden(2, 9), torch.zeros(2, 9))
    model = lively(whole("slm"))
    with pytest.raises(ValueError, match=r"position_ids \(2, 4\) do not fit an input of \(2, 9\)"):
        model(some_ids(2, 9), torch.zeros(2, 4, dtype=torch.long))
    with pytest.raises(ValueError, match="does not broadcast"):
        model(some_ids(2, 9), None, torch.ones(2, 9, dtype=torch.bool))


@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.uint8, torch.float32, torch.float16])
def test_cyberslm_takes_ones_and_zeros_of_any_dtype(dtype):
    block, keep = lively(cyberslm.DecoderBlock(config("cyberslm"))), torch.ones(2, 9, dtype=torch.bool)
    keep[1, :3] = False
    x = some_hidden(2, 9)
    assert torch.equal(block(x, keep.to(dtype))[0], block(x, keep)[0])
    if not dtype.is_floating_point:
        block(x, torch.zeros(2, 9, dtype=dtype))  # a batch of nothing but padding


def test_slm_positions_are_whole_numbers_below_the_models_limit():
    model = lively(whole("slm"))
    block, x, places = model.layers[0], some_hidden(1, 5), torch.arange(123, 128)[None]
    called = (lambda where: model(some_ids(1, 5), where), lambda where: block(x, where))
    for call in called:
        call(places)
        call(places.int())
        call(places - 124)  # a running count has -1 at padding before the first token
        with pytest.raises(ValueError, match=r"position_ids count tokens in int64 or int32, not torch\.float32"):
            call(places / 2)
        with pytest.raises(
            UserError, match="position 128 is beyond the model's 128 positions, of which the first is 0"
        ):
            call(places + 1)


@pytest.mark.parametrize("kind", ["bool", "added"])
def test_a_row_of_only_padding_attends_to_nothing_and_trains_without_nan(kind):
    model = lively(whole("slm"))
    keep = torch.ones(2, 1, 1, 6, dtype=torch.bool)
    keep[1] = False
    mask = keep if kind == "bool" else torch.zeros(keep.shape).masked_fill(~keep, -torch.inf)
    x, block = some_hidden(2, 6), model.layers[0]
    alone = x + block.mlp(block.post_attention_layernorm(x))
    close(block(x, torch.arange(6)[None], mask)[0][1], alone[1])
    model(some_ids(2, 6), attention_mask=mask).square().sum().backward()
    assert all(torch.isfinite(weight.grad).all() for weight in model.parameters())
