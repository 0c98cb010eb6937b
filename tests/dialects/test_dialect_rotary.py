"""Rotary positions as each dialect shows them, and one table for all layers."""

import copy

import pytest
import torch
from dialect_models import DIALECTS, config, lively, some_hidden, whole

from modicum.dialects import core, cyberslm, slm
from modicum.model.rotary import RotaryEmbedding


def test_cos_and_sin_have_the_shapes_and_values_of_their_definition():
    cos, sin = core.RotaryEmbedding(8, theta=100.0).get_cos_sin(5, "cpu", torch.float64)
    assert cos.shape == sin.shape == (1, 1, 5, 4)
    assert cos.dtype == sin.dtype == torch.float64
    angles = torch.arange(5.0)[:, None] * 100.0 ** (-torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(cos[0, 0].float(), angles.cos(), rtol=0, atol=1e-6)
    torch.testing.assert_close(sin[0, 0].float(), angles.sin(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_each_pair_is_turned_as_a_complex_number_in_fp32_and_comes_back_in_its_dtype(dtype):
    rope = core.RotaryEmbedding(8)
    x = torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    cos, sin = rope.get_cos_sin(5, "cpu", torch.float32)
    ours = core.RotaryEmbedding.apply_rope(x, cos, sin)
    theirs = torch.view_as_real(torch.view_as_complex(x.float().unflatten(-1, (4, 2))) * torch.complex(cos, sin))
    assert ours.dtype == dtype
    torch.testing.assert_close(ours, theirs.flatten(-2).to(dtype), rtol=0, atol=0 if dtype != torch.float32 else 1e-6)
    q, k = rope(x, 2 * x)
    assert torch.equal(q, ours)
    assert torch.equal(k, core.RotaryEmbedding.apply_rope(2 * x, cos, sin))


def test_frequencies_survive_half_precision_and_stay_out_of_the_state_dict():
    model = lively(whole("core"))
    exact = model.rope.inv_freq.clone()
    for cast in (model.half, model.bfloat16, model.double, lambda: model.to(torch.float16)):
        cast()
        assert model.rope.inv_freq.dtype == torch.float32
        assert torch.equal(model.rope.inv_freq, exact)
    assert "inv_freq" in dict(model.rope.named_buffers())
    assert not any("inv_freq" in name for name in model.state_dict())
    assert torch.equal(copy.deepcopy(model).rope.inv_freq, exact)
    with torch.device("meta"):
        empty = whole("core")
    assert torch.equal(empty.to_empty(device="cpu").rope.inv_freq, exact)


def test_changed_frequencies_change_the_attention():
    block = lively(core.TransformerBlock(config("core")))
    x = some_hidden(1, 9)
    before = block(x)
    block.attn.rope.inv_freq.mul_(0.25)
    assert not torch.allclose(block(x), before)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_all_layers_of_a_model_share_one_rotary_table(dialect):
    model = whole(dialect, layers=5)
    assert len([part for part in model.modules() if isinstance(part, RotaryEmbedding)]) == 1


@pytest.mark.parametrize("module", [cyberslm, slm])
def test_a_shared_table_changes_nothing_against_a_block_of_its_own(module):
    made = config(module.__name__.split(".")[-1])
    rope = module.RotaryEmbedding(made)
    shared = [lively(module.DecoderBlock(made, layer, rope)) for layer in range(3)]
    alone = [lively(module.DecoderBlock(made, layer)) for layer in range(3)]
    x = some_hidden(2, 9)
    more = () if module is cyberslm else (torch.arange(9)[None],)
    for one, other in zip(shared, alone, strict=True):
        attention = one.attn if module is cyberslm else one.self_attn
        assert attention.rope is rope
        assert torch.equal(one(x, *more)[0], other(x, *more)[0])


def test_a_table_of_another_layout_or_head_size_is_refused():
    with pytest.raises(ValueError, match="heads of 4 in the half layout, the block has heads of 8 in the interleaved"):
        cyberslm.DecoderBlock(config("cyberslm"), 0, slm.RotaryEmbedding(config("slm")))
    with pytest.raises(ValueError, match="heads of 16 in the interleaved"):
        core.TransformerBlock(config("core"), rope=core.RotaryEmbedding(16))
