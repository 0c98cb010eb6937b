"""A step of decoding gives what a pass over the whole sequence gives, for every kind of model, and each row alone."""

import pytest
import torch

from modicum.model import slots
from modicum.model.linear import Linear
from modicum.model.native import kernel_fault
from modicum.model.packing import RoundedMatrix
from modicum.model.quantized import install, matrix_names
from modicum.model.slots import SlotCache, extend
from modicum.model.stepper import cache_dtype, make_step

KINDS = [
    {},
    {"qk_norm": True},
    {"rotary_layout": "interleaved"},
    {"attention_bias": True, "mlp_bias": True},
    {"tie_word_embeddings": False, "num_key_value_heads": 6},
    {"head_dim": 84},
    {"num_key_value_heads": 1, "hidden_size": 60, "head_dim": 20, "intermediate_size": 37, "num_attention_heads": 3},
]
LENGTHS = [1, 30, 7, 18, 2]


def fed(model, cache, ids_BT, lengths):
    """Slots 0.. of the cache with so many tokens of each row; the next token of each, and its place."""
    for slot, length in enumerate(lengths):
        extend(model, ids_BT[slot : slot + 1, :length], cache, slot, 0)
    places_R = torch.tensor(lengths)
    return ids_BT[torch.arange(len(lengths)), places_R], torch.arange(len(lengths)), places_R


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("changes", KINDS, ids=str)
@torch.inference_mode()
def test_a_step_equals_a_pass_without_a_cache(tiny, lively, some_ids, changes, compiled):
    model = lively(tiny(**changes))
    cache, ids = SlotCache(model.config, 5, 40), some_ids(5, 40)
    step = make_step(model, cache, compiled=compiled)
    ids_R, slots_R, places_R = fed(model, cache, ids, LENGTHS)
    for _ in range(3):
        found = step(ids_R, slots_R, places_R, int(places_R.max()) + 1)
        for row, place in enumerate(places_R.tolist()):
            torch.testing.assert_close(found[row], model(ids[row : row + 1, : place + 1])[0, -1], atol=2e-4, rtol=2e-4)
        places_R = places_R + 1
        ids_R = ids[slots_R, places_R]


@pytest.mark.parametrize("changes", KINDS, ids=str)
@torch.inference_mode()
def test_slots_side_by_side_are_read_where_they_lie_with_the_same_bits(tiny, lively, some_ids, monkeypatch, changes):
    model = lively(tiny(**changes))
    cache, ids = SlotCache(model.config, 5, 40), some_ids(5, 40)
    step = make_step(model, cache, compiled=False)
    given = fed(model, cache, ids, LENGTHS)
    rows = [slice(0, 5), slice(1, 3), slice(3, 4)]
    seen, attend = [], slots.attend_sdpa

    def noting(q, k, v, **how):
        seen.append(k.untyped_storage().data_ptr() in [layer.untyped_storage().data_ptr() for layer in cache.keys])
        return attend(q, k, v, **how)

    monkeypatch.setattr(slots, "attend_sdpa", noting)
    found = [step(*(column[part] for column in given), 31) for part in rows]
    assert all(seen)
    monkeypatch.setattr(slots, "_picked", lambda slots_R: slots_R)
    for part, logits in zip(rows, found, strict=True):
        assert torch.equal(step(*(column[part] for column in given), 31), logits)


@torch.inference_mode()
def test_a_pass_over_a_prompt_in_pieces_is_a_pass_over_all_of_it(tiny, lively, some_ids):
    model, ids = lively(tiny()), some_ids(1, 40)
    cache = SlotCache(model.config, 2, 40)
    pieces = [extend(model, ids[:, a:b], cache, 1, a) for a, b in ((0, 7), (7, 8), (8, 40))]
    torch.testing.assert_close(torch.cat(pieces, 1), model.hidden(ids), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_a_row_gives_the_same_bits_whoever_shares_its_step(tiny, lively, some_ids, dtype):
    if (fault := kernel_fault()) is not None:
        pytest.skip(f"promised only where the kernel is: {fault}")
    model = lively(tiny()).to(dtype)
    cache, ids = SlotCache(model.config, 9, 40, dtype=dtype), some_ids(9, 40)
    step = make_step(model, cache, compiled=True)
    ids_R, slots_R, places_R = fed(model, cache, ids, [12, 3, 30, 1, 7, 7, 22, 39, 5])
    alone = torch.cat([step(ids_R[i : i + 1], slots_R[i : i + 1], places_R[i : i + 1], 40) for i in range(9)])
    for rows in ([0, 1], [2, 1, 0], [4, 3, 8, 5], [8, 7, 6, 5, 4, 3, 2, 1, 0]):
        index = torch.tensor(rows)
        assert torch.equal(step(ids_R[index], slots_R[index], places_R[index], 40), alone[index])


@pytest.mark.parametrize("head", [8, 84])
@torch.inference_mode()
def test_a_bfloat16_step_is_as_near_to_float32_as_a_bfloat16_pass(tiny, lively, some_ids, head):
    config = tiny(head_dim=head)
    model, ids = lively(config), some_ids(5, 40)
    exact = torch.stack([model(ids[i : i + 1, : n + 1])[0, -1] for i, n in enumerate(LENGTHS)])
    half = lively(config).bfloat16()
    passed = torch.stack([half(ids[i : i + 1, : n + 1])[0, -1].float() for i, n in enumerate(LENGTHS)])
    cache = SlotCache(half.config, 5, 40, dtype=torch.bfloat16)
    found = make_step(half, cache, compiled=True)(*fed(half, cache, ids, LENGTHS), 40)
    assert found.dtype == torch.float32
    assert (found - exact).square().mean() < 1.2 * (passed - exact).square().mean()


@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_rounded_matrices_are_multiplied_as_their_modules_do(tiny, lively, some_ids, bias):
    model = lively(tiny(attention_bias=bias))
    draw = torch.Generator().manual_seed(3)
    for name in matrix_names(model):
        shape = model.get_submodule(name).weight.shape
        bits = 8 if "embed" in name or "mlp" in name else 4
        half = 1 << (bits - 1)
        values = torch.randint(-half, half, shape, generator=draw, dtype=torch.int8)
        scale = 0.8 / half / shape[1] ** 0.5
        install(model, name, RoundedMatrix(values, torch.full((shape[0], 1), scale), bits))
    cache, ids = SlotCache(model.config, 5, 40), some_ids(5, 40)
    fast, plain = (make_step(model, cache, compiled=compiled) for compiled in (True, False))
    given = fed(model, cache, ids, LENGTHS)
    torch.testing.assert_close(fast(*given, 40), plain(*given, 40), atol=0.02, rtol=0.02)


@torch.inference_mode()
def test_rounded_matrices_in_a_type_that_the_kernel_has_not_are_multiplied_one_by_one(tiny, lively):
    model = lively(tiny())
    for name in matrix_names(model):
        values = torch.ones(model.get_submodule(name).weight.shape, dtype=torch.int8)
        install(model, name, RoundedMatrix(values, torch.full((values.shape[0], 1), 0.01), 8))
    wide = model.double()
    cache = SlotCache(wide.config, 5, 40, dtype=torch.float64)
    step, plain = (make_step(wide, cache, compiled=compiled) for compiled in (True, False))
    assert step.__qualname__ == plain.__qualname__


@torch.inference_mode()
def test_a_part_that_the_kernel_does_not_know_is_called_itself(tiny, lively, some_ids):
    """An adapter, say, which adds to what the matrix gives."""
    model = lively(tiny())

    class Doubled(type(model.model.layers[0].mlp.up_proj)):
        def forward(self, input):
            return 2 * super().forward(input)

    model.model.layers[1].mlp.up_proj.__class__ = Doubled
    cache, ids = SlotCache(model.config, 5, 40), some_ids(5, 40)
    found = make_step(model, cache, compiled=True)(*fed(model, cache, ids, LENGTHS), 40)
    for row, length in enumerate(LENGTHS):
        torch.testing.assert_close(found[row], model(ids[row : row + 1, : length + 1])[0, -1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("names", [("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")], ids=str)
@pytest.mark.parametrize("kind", ["an adapter", "PyTorch's own"])
@torch.inference_mode()
def test_all_parts_of_one_input_that_the_kernel_does_not_know_are_called_themselves(
    tiny, lively, some_ids, names, kind
):
    """All of them, so that none is of another kind than those beside it."""

    class Doubled(Linear):
        def forward(self, input):
            return 2 * super().forward(input)

    model = lively(tiny())
    block = model.model.layers[1]
    parent = block.self_attn if "q_proj" in names else block.mlp
    for name in names:
        before = getattr(parent, name)
        after = (Doubled if kind == "an adapter" else torch.nn.Linear)(before.in_features, before.out_features, False)
        after.weight.copy_(before.weight)
        setattr(parent, name, after)
    cache, ids = SlotCache(model.config, 5, 40), some_ids(5, 40)
    found = make_step(model, cache, compiled=True)(*fed(model, cache, ids, LENGTHS), 40)
    for row, length in enumerate(LENGTHS):
        torch.testing.assert_close(found[row], model(ids[row : row + 1, : length + 1])[0, -1], atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_a_token_that_is_none_is_refused_and_not_read_from_elsewhere(tiny, lively):
    model = lively(tiny())
    step = make_step(model, SlotCache(model.config, 1, 8), compiled=True)
    with pytest.raises(Exception, match="is outside"):
        step(torch.tensor([96]), torch.tensor([0]), torch.tensor([0]), 1)


@torch.inference_mode()
def test_as_many_threads_as_there_are_rows_or_more_change_no_bit(tiny, lively, some_ids):
    if (fault := kernel_fault()) is not None:
        pytest.skip(f"promised only where the kernel is: {fault}")
    model, before = lively(tiny()), torch.get_num_threads()
    cache, ids = SlotCache(model.config, 5, 40), some_ids(5, 40)
    given = fed(model, cache, ids, LENGTHS)
    found = []
    try:
        for threads in (1, 2, 3, 5, 8, 2):
            torch.set_num_threads(threads)
            found.append(make_step(model, cache, compiled=True)(*given, 40))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(each, found[0]) for each in found)


@torch.inference_mode()
def test_a_slot_given_to_another_has_the_same_tokens_there(tiny, lively, some_ids):
    model, ids = lively(tiny()), some_ids(1, 40)
    cache = SlotCache(model.config, 3, 40)
    extend(model, ids[:, :20], cache, 2, 0)
    cache.copy(2, 0, 15)
    found = extend(model, ids[:, 15:], cache, 0, 15)
    torch.testing.assert_close(found, model.hidden(ids)[:, 15:], atol=1e-4, rtol=1e-4)


def test_keys_and_values_are_smaller_beside_rounded_matrices_where_the_kernel_reads_them(tiny, lively):
    model = lively(tiny())
    assert cache_dtype(model, compiled=True) == cache_dtype(model, compiled=False) == torch.float32
    for name in matrix_names(model):
        values = torch.ones(model.get_submodule(name).weight.shape, dtype=torch.int8)
        install(model, name, RoundedMatrix(values, torch.full((values.shape[0], 1), 0.01), 8))
    assert cache_dtype(model, compiled=False) == torch.float32
    smaller = torch.bfloat16 if kernel_fault() is None else torch.float32
    assert cache_dtype(model, compiled=True) == smaller


def test_a_cache_takes_the_memory_it_says(tiny):
    cache = SlotCache(tiny(), 3, 40, dtype=torch.bfloat16)
    taken = sum(t.numel() * t.itemsize for t in (*cache.keys, *cache.values))
    assert SlotCache.bytes(tiny(), 3, 40, torch.bfloat16) == taken
