"""The caches: full, reused, reordered and truncated, each as its documentation says."""

import pytest
import torch
from dialect_models import config, lively, some_hidden, some_ids, whole

from modicum.dialects import core, cyberslm, slm
from modicum.store import UserError


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def step(model, ids, cache):
    """Logits of `ids` after what the cache holds, which takes them in."""
    with torch.no_grad():
        return model(ids, cache) if isinstance(model, core.LanguageModel) else model(ids, None, None, cache, True)[0]


@pytest.fixture(params=["slm", "core"])
def model(request):
    return lively(whole(request.param))


both_memories = pytest.mark.parametrize("capacity", [None, 40])


@both_memories
def test_a_cached_continuation_equals_one_pass(model, capacity):
    ids, cache = some_ids(3, 40), slm.KVCache(capacity=capacity)
    outs = [step(model, part, cache) for part in ids.split([17, 1, 1, 5, 16], dim=1)]
    close(torch.cat(outs, dim=1), model(ids))
    assert cache.length == 40


def test_a_cyberslm_continuation_equals_one_pass():
    model, ids, cache = lively(whole("cyberslm")), some_ids(3, 40), None
    outs = []
    for part in ids.split([17, 1, 1, 5, 16], dim=1):
        logits, cache = model(part, kv_cache=cache, use_cache=True)
        outs.append(logits)
    close(torch.cat(outs, dim=1), model(ids))
    assert [pair[0].shape for pair in cache] == [(3, 3, 40, 8)] * 2


def test_cyberslm_pairs_may_be_cut_and_reordered_by_hand():
    model, ids = lively(whole("cyberslm")), some_ids(3, 12)
    _, cache = model(ids, use_cache=True)
    order = torch.tensor([2, 0, 2])
    cut = [(k[order, :, :8], v[order, :, :8]) for k, v in cache]
    close(model(ids[order, 8:], kv_cache=cut), model(ids)[order, 8:])


@pytest.mark.parametrize("dialect", ["cyberslm", "slm", "core"])
def test_a_chunk_behind_a_cached_past_sees_no_later_token(dialect):
    model, ids = lively(whole(dialect)), some_ids(1, 20)
    changed = ids.clone()
    changed[:, 15:] = (changed[:, 15:] + 1) % 61
    outs = []
    for tokens in (ids, changed):
        if dialect == "cyberslm":
            outs.append(model(tokens[:, 8:], kv_cache=model(tokens[:, :8], use_cache=True)[1]))
        else:
            cache = slm.KVCache()
            step(model, tokens[:, :8], cache)
            outs.append(step(model, tokens[:, 8:], cache))
    assert torch.equal(outs[0][:, :7], outs[1][:, :7])
    assert not torch.equal(outs[0][:, 7:], outs[1][:, 7:])


def test_a_full_cache_says_so_and_stays_as_it_was(model):
    ids, cache = some_ids(2, 12), slm.KVCache(capacity=10)
    step(model, ids[:, :8], cache)
    with pytest.raises(UserError, match=r"cache is full: it has room for 10 tokens, and 8 \+ 3 are asked for"):
        step(model, ids[:, 8:11], cache)
    assert cache.length == 8
    close(step(model, ids[:, 8:10], cache), model(ids)[:, 8:10])
    with pytest.raises(UserError, match=r"10 \+ 1"):
        step(model, ids[:, :1], cache)


@both_memories
def test_a_cache_used_without_reset_goes_on_and_one_that_was_reset_remembers_nothing(model, capacity):
    first, second, cache = some_ids(2, 6, seed=4), some_ids(2, 9, seed=5), slm.KVCache(capacity=capacity)
    step(model, first, cache)
    close(step(model, second, cache), model(torch.cat([first, second], dim=1))[:, 6:])
    cache.reset()
    assert cache.length == 0
    close(step(model, second, cache), model(second))


@both_memories
def test_a_truncated_cache_goes_on_from_there(model, capacity):
    ids, cache = some_ids(2, 20), slm.KVCache(capacity=capacity)
    step(model, ids[:, :10], cache)
    step(model, some_ids(2, 7, seed=8), cache)
    cache.truncate(10)
    assert cache.length == 10
    close(step(model, ids[:, 10:], cache), model(ids)[:, 10:])
    for wrong in (21, -1):
        with pytest.raises(ValueError, match=f"cannot keep {wrong} tokens of 20"):
            cache.truncate(wrong)


@both_memories
def test_reordered_rows_go_on_as_the_rows_they_came_from(model, capacity):
    ids, order, cache = some_ids(3, 20), torch.tensor([2, 0, 2]), slm.KVCache(capacity=capacity)
    step(model, ids[:, :12], cache)
    cache.reorder(order)
    close(step(model, ids[order, 12:], cache), model(ids)[order, 12:])


def test_a_growing_cache_takes_more_beams_and_a_reserved_one_says_that_it_cannot(model):
    ids, order, cache = some_ids(2, 9), torch.tensor([1, 1, 0, 1]), slm.KVCache()
    step(model, ids[:, :6], cache)
    cache.reorder(order)
    close(step(model, ids[order, 6:], cache), model(ids)[order, 6:])
    reserved = slm.KVCache(capacity=12)
    step(model, ids, reserved)
    with pytest.raises(ValueError, match="expected 2 row numbers, as memory is reserved, not 4"):
        reserved.reorder(order)


def test_other_rows_are_refused_until_the_cache_is_reset(model):
    for cache in (slm.KVCache(), slm.KVCache(capacity=9)):
        step(model, some_ids(2, 3), cache)
        with pytest.raises(ValueError, match=r"the cache holds keys of shape \(2, .* reset it before other rows"):
            step(model, some_ids(3, 1), cache)
        cache.reset()
        ids = some_ids(3, 4)
        close(step(model, ids, cache), model(ids))


def test_a_reserved_cache_writes_into_the_same_memory():
    model, cache = lively(whole("slm")), slm.KVCache(capacity=16)
    step(model, some_ids(2, 3), cache)
    before = [keys.data_ptr() for keys, _ in cache.tensors()]
    step(model, some_ids(2, 5), cache)
    cache.reset()
    step(model, some_ids(2, 9), cache)
    assert [keys.data_ptr() for keys, _ in cache.tensors()] == before
    with pytest.raises(ValueError, match="at least 1 token"):
        slm.KVCache(capacity=0)


def test_a_reserved_cache_follows_the_model_to_another_dtype_after_a_reset():
    model, cache = lively(whole("slm")), slm.KVCache(capacity=16)
    step(model, some_ids(2, 3), cache)
    cache.reset()
    step(model.half(), some_ids(2, 3), cache)
    assert {keys.dtype for keys, _ in cache.tensors()} == {torch.float16}


def test_slm_layers_share_a_cache_by_their_numbers_in_any_order():
    blocks = [lively(slm.DecoderBlock(config("slm"), layer), layer) for layer in range(3)]
    x, places = some_hidden(2, 9), torch.arange(9)[None]
    cache = slm.KVCache()
    for part in (slice(0, 5), slice(5, 9)):
        for block in (blocks[2], blocks[0], blocks[1]):
            out, returned = block(x[:, part], places[:, part], None, cache, True)
            assert returned is cache
            close(out, block(x, places)[0][:, part])
    assert [cache.length_of(layer) for layer in range(4)] == [9, 9, 9, 0]
    again = slm.KVCache.from_tensors(cache.tensors())
    close(blocks[1](x, places, None, again)[0], blocks[1](x, places, None, cache)[0])


def test_slm_without_use_cache_sees_the_cache_and_leaves_it():
    for cache in (slm.KVCache(), slm.KVCache(capacity=12)):
        model, ids = lively(whole("slm")), some_ids(2, 12)
        step(model, ids[:, :8], cache)
        for _ in range(2):
            with torch.no_grad():
                close(model(ids[:, 8:], kv_cache=cache), model(ids)[:, 8:])
            assert cache.length == 8
        close(step(model, ids[:, 8:], cache), model(ids)[:, 8:])


def test_a_new_slm_cache_is_given_back_where_none_was_given():
    model, ids = lively(whole("slm")), some_ids(2, 9)
    _, cache = model(ids[:, :5], use_cache=True)
    assert cache.length == 5
    again = slm.KVCache.from_tensors(cache.tensors())
    close(model(ids[:, 5:], kv_cache=again), model(ids)[:, 5:])


def test_core_blocks_without_numbers_keep_apart_in_one_cache():
    blocks = [lively(core.TransformerBlock(config("core")), seed) for seed in range(3)]
    x, cache = some_hidden(2, 9), core.KVCache()
    outs = []
    for part in (x[:, :5], x[:, 5:]):
        for block in blocks:
            part = block(part, cache)
        outs.append(part)
    for block in blocks:
        x = block(x)
    close(torch.cat(outs, dim=1), x)
    assert len(cache.tensors()) == 3


def test_core_blocks_cloned_from_one_keep_apart_too():
    import copy

    first = lively(core.TransformerBlock(config("core")))
    second, cache, x = copy.deepcopy(first), core.KVCache(), some_hidden(1, 6)
    second(first(x[:, :4], cache), cache)
    close(second(first(x[:, 4:], cache), cache), second(first(x))[:, 4:])
    assert len(cache.tensors()) == 2


def test_cyberslm_refuses_a_cache_of_other_rows():
    block = lively(cyberslm.DecoderBlock(config("cyberslm")))
    _, _, present = block(some_hidden(2, 5), use_cache=True)
    with pytest.raises(ValueError, match="the cache holds keys of shape"):
        block(some_hidden(3, 1), kv_cache=present)


@both_memories
@pytest.mark.parametrize("order", [torch.tensor([True, False]), torch.tensor([1, 0], dtype=torch.uint8), torch.ones(2)])
def test_only_row_numbers_reorder(model, capacity, order):
    """PyTorch takes bool and uint8 for a mask of the rows."""
    cache = slm.KVCache(capacity=capacity)
    step(model, some_ids(2, 5), cache)
    before = [part.clone() for pair in cache.tensors() for part in pair]
    with pytest.raises(ValueError, match=r"expected row numbers, \(rows,\) int32 or int64, not \(2,\) torch"):
        cache.reorder(order)
    after = [part for pair in cache.tensors() for part in pair]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(after, before, strict=True))
    cache.reorder(torch.tensor([1, 0], dtype=torch.int32))
    assert torch.equal(cache.tensors()[0][0], before[0][[1, 0]])


def test_cyberslm_layers_without_a_pair_hold_nothing_yet():
    model, ids = lively(whole("cyberslm")), some_ids(2, 9)
    logits, cache = model(ids, kv_cache=[None, None], use_cache=True)
    close(logits, model(ids))
    assert [pair[0].shape[2] for pair in cache] == [9, 9]
    empty = tuple(torch.zeros(2, 3, 0, 8) for _ in range(2))
    close(model(ids, kv_cache=[empty, None]), model(ids))


def test_cyberslm_names_the_pairs_that_are_too_few_or_not_alike():
    model, ids = lively(whole("cyberslm")), some_ids(2, 9)
    _, (first, second) = model(ids, use_cache=True)
    for pairs, count in (([], 0), ([first], 1), ([first, second, second], 3)):
        with pytest.raises(ValueError, match=f"kv_cache has {count} pairs for 2 layers"):
            model(ids, kv_cache=pairs)
    shorter = tuple(part[:, :, :4] for part in second)
    flat = tuple(part.flatten(1, 2) for part in second)
    for pairs in ([first, shorter], [first, None], [first, (second[0], shorter[1])], [flat, flat], [first, flat]):
        with pytest.raises(ValueError, match=r"must be of one shape, \(rows, heads, tokens, head_dim\), not \[\(2, "):
            model(ids, kv_cache=pairs)
    with pytest.raises(ValueError, match="must be of one shape"):
        model.layers[0](some_hidden(2, 1), kv_cache=(first[0], shorter[1]))
