from itertools import pairwise

import pytest
import torch

from modicum.model import KVCache
from modicum.store import UserError


def step_by_step(model, ids, *, first, **masks):
    """Logits of `ids` fed as a prompt of `first` tokens and then one at a time."""
    cache = KVCache(model.config, len(ids), ids.shape[1])
    outs, edges = [], [0, *range(first, ids.shape[1] + 1)]
    with torch.no_grad():
        for start, stop in pairwise(edges):
            here = {name: mask[:, start:stop] for name, mask in masks.items()}
            outs.append(model(ids[:, start:stop], cache=cache, **here))
    assert cache.length == ids.shape[1]
    return torch.cat(outs, dim=1)


def left_padding(batch: int, length: int) -> torch.Tensor:
    keep = torch.ones(batch, length, dtype=torch.bool)
    for row in range(batch):
        keep[row, : 3 * row] = False
    return keep


@pytest.mark.parametrize("first", [1, 10, 40])
def test_64_steps_with_left_padding_equal_one_pass(tiny, lively, some_ids, first):
    model, ids = lively(tiny(qk_norm=True)), some_ids(3, first + 64)
    keep = left_padding(3, first + 64)
    with torch.no_grad():
        whole = model(ids, attention_mask=keep)
    stepped = step_by_step(model, ids, first=first, attention_mask=keep)
    torch.testing.assert_close(stepped[keep], whole[keep], rtol=0, atol=1e-5)


def test_64_steps_without_padding_equal_one_pass(tiny, lively, some_ids):
    model, ids = lively(tiny()), some_ids(2, 80)
    with torch.no_grad():
        torch.testing.assert_close(step_by_step(model, ids, first=16), model(ids), rtol=0, atol=1e-5)


def test_padding_and_documents_in_a_cache_equal_one_pass(tiny, lively, some_ids):
    model, ids = lively(tiny()), some_ids(3, 70)
    keep = left_padding(3, 70)
    documents = torch.zeros(3, 70, dtype=torch.int32)
    documents[:, 20:], documents[:, 45:] = 1, 2
    documents[2, 60:] = -1
    masks = {"attention_mask": keep, "documents": documents}
    real = keep & (documents >= 0)
    with torch.no_grad():
        whole = model(ids, **masks)
    torch.testing.assert_close(step_by_step(model, ids, first=6, **masks)[real], whole[real], rtol=0, atol=1e-5)


def test_a_mask_over_past_and_new_tokens_says_the_same_as_one_over_the_new(tiny, lively, some_ids):
    model, ids = lively(tiny()), some_ids(3, 20)
    keep = left_padding(3, 20)
    outs = []
    for over_all in (True, False):
        cache = KVCache(model.config, 3, 20)
        with torch.no_grad():
            model(ids[:, :12], cache=cache, attention_mask=keep[:, :12])
            outs.append(model(ids[:, 12:], cache=cache, attention_mask=keep if over_all else keep[:, 12:]))
    assert torch.equal(outs[0], outs[1])


def test_the_padding_of_a_prompt_is_remembered_without_being_repeated(tiny, lively, some_ids):
    model, ids = lively(tiny()), some_ids(3, 20)
    keep = left_padding(3, 20)
    cache = KVCache(model.config, 3, 20)
    with torch.no_grad():
        model(ids[:, :12], cache=cache, attention_mask=keep[:, :12])
        later = model(ids[:, 12:], cache=cache)
        torch.testing.assert_close(later, model(ids, attention_mask=keep)[:, 12:], rtol=0, atol=1e-5)


def test_left_padding_changes_nothing_against_the_row_alone(tiny, lively, some_ids):
    model, ids = lively(tiny(rope_scaling={"rope_type": "yarn", "factor": 4.0})), some_ids(1, 12)
    padded = torch.cat([torch.full((1, 9), 5), ids], dim=1)
    keep = torch.arange(21)[None] >= 9
    with torch.no_grad():
        torch.testing.assert_close(model(padded, attention_mask=keep)[:, 9:], model(ids), rtol=0, atol=1e-5)


def test_a_chunk_after_a_cached_past_sees_no_future(tiny, lively, some_ids):
    model, ids = lively(tiny()), some_ids(1, 30)
    changed = ids.clone()
    changed[:, 20:] = (changed[:, 20:] + 1) % 96
    outs = []
    for tokens in (ids, changed):
        cache = KVCache(model.config, 1, 30)
        with torch.no_grad():
            model(tokens[:, :10], cache=cache)
            outs.append(model(tokens[:, 10:], cache=cache))
    assert torch.equal(outs[0][:, :10], outs[1][:, :10])
    assert not torch.equal(outs[0][:, 10:], outs[1][:, 10:])


def test_attention_weights_cover_the_cached_tokens_too(tiny, lively, some_ids):
    model, ids = lively(tiny()), some_ids(2, 15)
    keep = left_padding(2, 15)
    cache = KVCache(model.config, 2, 15)
    with torch.no_grad():
        _, whole = model(ids, attention_mask=keep, return_attention=True)
        model(ids[:, :10], cache=cache, attention_mask=keep[:, :10])
        _, later = model(ids[:, 10:], cache=cache, return_attention=True)
    torch.testing.assert_close(later[1], whole[1][:, :, 10:], rtol=0, atol=1e-5)


def test_a_reset_cache_remembers_nothing(tiny, lively, some_ids):
    model, ids, other = lively(tiny()), some_ids(2, 12), some_ids(2, 9, seed=7)
    fresh, used = KVCache(model.config, 2, 12), KVCache(model.config, 2, 12)
    documents = torch.ones(2, 9, dtype=torch.int32)
    with torch.no_grad():
        model(other, cache=used, attention_mask=left_padding(2, 9), documents=documents)
        used.reset()
        assert torch.equal(model(ids, cache=used), model(ids, cache=fresh))


def test_a_truncated_cache_goes_on_from_there(tiny, lively, some_ids):
    model, ids = lively(tiny()), some_ids(2, 20)
    cache = KVCache(model.config, 2, 20)
    with torch.no_grad():
        model(some_ids(2, 16, seed=9), cache=cache)
        cache.truncate(0)
        model(ids[:, :10], cache=cache)
        model(some_ids(2, 5, seed=8), cache=cache)
        cache.truncate(10)
        torch.testing.assert_close(model(ids[:, 10:], cache=cache), model(ids)[:, 10:], rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="cannot keep 21 tokens of 20"):
        cache.truncate(21)


def test_reordered_rows_go_on_as_the_rows_they_came_from(tiny, lively, some_ids):
    model, ids = lively(tiny()), some_ids(3, 20)
    keep, order = left_padding(3, 20), torch.tensor([2, 0, 2])
    cache = KVCache(model.config, 3, 20)
    with torch.no_grad():
        model(ids[:, :12], cache=cache, attention_mask=keep[:, :12])
        cache.reorder(order)
        after = model(ids[order, 12:], cache=cache)
        torch.testing.assert_close(after, model(ids, attention_mask=keep)[order, 12:], rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="expected 3 row numbers"):
        cache.reorder(torch.tensor([0]))
    for mask in (torch.tensor([True, False, True]), torch.tensor([1, 0, 1], dtype=torch.uint8)):
        with pytest.raises(ValueError, match=r"expected row numbers, \(rows,\) int32 or int64, not \(3,\) torch"):
            cache.reorder(mask)


def test_a_full_cache_says_so_and_stays_as_it_was(tiny, lively, some_ids):
    model, ids = lively(tiny()), some_ids(1, 12)
    cache = KVCache(model.config, 1, 10)
    with torch.no_grad():
        model(ids[:, :8], cache=cache)
        with pytest.raises(UserError, match=r"room for 10 tokens, and 8 \+ 3"):
            model(ids[:, 8:11], cache=cache)
        assert cache.length == 8
        torch.testing.assert_close(model(ids[:, 8:10], cache=cache), model(ids[:, :10])[:, 8:], rtol=0, atol=1e-5)


def test_rows_of_another_number_and_forgotten_documents_are_refused(tiny, lively, some_ids):
    model = lively(tiny())
    cache = KVCache(model.config, 2, 10)
    with pytest.raises(ValueError, match="the cache has 2 rows, the input 1"):
        model(some_ids(1, 3), cache=cache)
    model(some_ids(2, 3), cache=cache, documents=torch.zeros(2, 3, dtype=torch.int32))
    with pytest.raises(ValueError, match="give the new ones theirs"):
        model(some_ids(2, 1), cache=cache)


def test_a_bf16_cache_of_a_bf16_model_stays_close(tiny, lively, some_ids):
    model, ids = lively(tiny()), some_ids(2, 40)
    with torch.no_grad():
        exact = model(ids)
        model.bfloat16()
        cache = KVCache(model.config, 2, 40, dtype=torch.bfloat16)
        outs = [model(ids[:, t : t + 1], cache=cache) for t in range(40)]
    assert (torch.cat(outs, 1) - exact).abs().mean() < 0.03 * exact.abs().mean() + 0.03
