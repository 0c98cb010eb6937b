"""A prompt read by a decoder of rounded matrices: as its modules read it, and wherever its pieces are cut."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from modicum.model.native import kernel_fault
from modicum.model.packing import RoundedMatrix
from modicum.model.quantized import QuantizedEmbedding, QuantizedLinear, install, matrix_names
from modicum.model.reference import reference_logits
from modicum.model.slots import SlotCache, extend
from modicum.model.stepper import make_reader

# lengths that are no multiple of a tile, a panel or a batch; heads that fill no panel, and groups that no two share
KINDS = [
    {},
    {"qk_norm": True, "tie_word_embeddings": False},
    {"rotary_layout": "interleaved"},
    {"attention_bias": True, "mlp_bias": True},
    {"num_key_value_heads": 6, "head_dim": 84},
    {"num_key_value_heads": 1, "hidden_size": 60, "head_dim": 20, "intermediate_size": 37, "num_attention_heads": 3},
]
LENGTHS = [1, 2, 11, 12, 31, 33, 49, 96, 117]


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def rounded(tiny, lively):
    def build(**changes):
        model = lively(tiny(**changes))
        draw = torch.Generator().manual_seed(3)
        for name in matrix_names(model):
            shape = model.get_submodule(name).weight.shape
            bits = 4 if "down" in name or "o_proj" in name else 8
            half = 1 << (bits - 1)
            values = torch.randint(-half, half, shape, generator=draw, dtype=torch.int8)
            install(model, name, RoundedMatrix(values, torch.full((shape[0], 1), 1.4 / half / shape[1] ** 0.5), bits))
        return model

    return build


def kernel(model, cache):
    if (fault := kernel_fault()) is not None:
        pytest.skip(f"promised only where the kernel is: {fault}")
    return make_reader(model, cache, compiled=True)


@pytest.mark.parametrize("changes", KINDS, ids=str)
@torch.inference_mode()
def test_what_is_read_is_what_the_modules_read(rounded, some_ids, changes):
    model, ids = rounded(**changes), some_ids(len(LENGTHS), 120)
    cache, plain = (SlotCache(model.config, len(LENGTHS), 128) for _ in range(2))
    read = make_reader(model, cache, compiled=True)
    for slot, length in enumerate(LENGTHS):
        given = ids[slot : slot + 1, :length]
        found, wanted = read(given, slot, 0), extend(model, given, plain, slot, 0)[:, -1]
        assert found.shape == (1, model.config.hidden_size)
        # a number between two steps of an activation may fall to either side
        assert (found - wanted).abs().mean() < 0.01 * wanted.abs().mean(), length
        for a, b in zip((*cache.keys, *cache.values), (*plain.keys, *plain.values), strict=True):
            assert (a[slot] - b[slot]).abs().sum() <= 0.01 * b[slot].abs().sum(), length


@pytest.mark.parametrize("changes", KINDS, ids=str)
@torch.inference_mode()
def test_what_is_read_is_near_what_float64_says_of_the_same_numbers(rounded, some_ids, changes):
    model, ids = rounded(**changes), some_ids(1, 117)
    parts = {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLinear | QuantizedEmbedding)}
    state = model.state_dict() | {f"{name}.weight": part.matrix().wide() for name, part in parts.items()}
    wanted = reference_logits(state, model.config, ids)[:, -1]
    found = model.head(kernel(model, SlotCache(model.config, 1, 128))(ids, 0, 0)).double().numpy()
    # activations are rounded to 8 bits in the one and not in the other
    assert np.abs(found - wanted).mean() < 0.03 * np.abs(wanted).mean()


@pytest.mark.parametrize("changes", KINDS, ids=str)
@torch.inference_mode()
def test_neither_pieces_nor_threads_change_a_bit(rounded, some_ids, changes):
    model, ids = rounded(**changes), some_ids(1, 117)
    torch.set_num_threads(1)
    whole = SlotCache(model.config, 1, 128)
    wanted = kernel(model, whole)(ids, 0, 0)
    for threads, cuts in ((2, (0, 117)), (3, (0, 1, 13, 64, 65, 117)), (1, (0, 50, 116, 117))):
        torch.set_num_threads(threads)
        cache = SlotCache(model.config, 3, 128)
        read = kernel(model, cache)
        for a, b in pairwise(cuts):
            found = read(ids[:, a:b], 1, a)
        assert torch.equal(found, wanted), threads
        for mine, other in zip((*cache.keys, *cache.values), (*whole.keys, *whole.values), strict=True):
            assert torch.equal(mine[1], other[0])
            assert not mine[[0, 2]].any(), "another slot's"


@torch.inference_mode()
def test_a_cache_of_bfloat16_is_as_near_as_its_keys_are(rounded, some_ids):
    model, ids = rounded(num_key_value_heads=6), some_ids(1, 70)
    wanted = kernel(model, SlotCache(model.config, 1, 80))(ids, 0, 0)
    found = kernel(model, SlotCache(model.config, 1, 80, dtype=torch.bfloat16))(ids, 0, 0)
    assert 0 < (found - wanted).abs().mean() < 0.03 * wanted.abs().mean()
    assert kernel(model.bfloat16(), SlotCache(model.config, 1, 80))(ids, 0, 0).dtype == torch.bfloat16


@torch.inference_mode()
def test_full_matrices_and_other_types_of_cache_are_left_to_pytorch(rounded, lively, tiny):
    model = rounded()
    plain = make_reader(model, SlotCache(model.config, 1, 8), compiled=False)
    for other, dtype in ((lively(tiny()), torch.float32), (model, torch.float16)):
        read = make_reader(other, SlotCache(other.config, 1, 8, dtype=dtype), compiled=True)
        assert read.__qualname__ == plain.__qualname__


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@torch.inference_mode()
def test_what_is_not_finite_reaches_the_result(rounded, some_ids, wrong):
    model, ids = rounded(), some_ids(1, 40)
    model.model.layers[0].post_attention_layernorm.weight[5] = wrong
    assert not kernel(model, SlotCache(model.config, 1, 64))(ids, 0, 0).isfinite().all()


@torch.inference_mode()
def test_tokens_that_are_none_or_do_not_fit_are_refused(rounded, some_ids):
    model = rounded()
    read = kernel(model, SlotCache(model.config, 1, 20))
    with pytest.raises(RuntimeError, match="token id 96 is outside"):
        read(torch.tensor([[3, 96]]), 0, 0)
    with pytest.raises(RuntimeError, match="do not fit"):
        read(some_ids(1, 10), 0, 15)
    with pytest.raises(RuntimeError, match="no tokens"):
        read(some_ids(1, 10)[:, :0], 0, 5)
