"""fp16 through 12 layers of width 4096 whose squares overflow: finite, and what fp32 computes, forward and backward."""

import copy

import pytest
import torch
from dialect_models import Called
from torch import nn

from modicum.dialects import core, cyberslm, slm
from modicum.model import RMSNorm
from modicum.model.attention import Attention
from modicum.model.mlp import FeedForward

# whole matrices of 4096 by 4096 in fp16 are slow on a CPU
every_dialect = pytest.mark.parametrize(
    "dialect", ["slm", pytest.param("cyberslm", marks=pytest.mark.slow), pytest.param("core", marks=pytest.mark.slow)]
)


def wide(dialect: str) -> list[nn.Module]:
    """12 layers of hidden size 4096; where attention must be as wide as that, one block 12 times, to spare memory."""
    if dialect == "slm":
        sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 32}
        made = slm.SLMConfig(vocab_size=8, hidden_size=4096, num_hidden_layers=12, **sizes)
        return [slm.DecoderBlock(made, layer).half() for layer in range(12)]
    if dialect == "cyberslm":
        made = cyberslm.CyberSLMConfig(vocab_size=8, hidden_dim=4096, num_heads=32, ffn_hidden_dim=32, eos_token_id=1)
        return [cyberslm.DecoderBlock(made).half()] * 12
    made = core.ModelConfig(n_embd=4096, n_head=32, ffn_dim_multiplier=0.003, multiple_of=32)
    return [core.TransformerBlock(made).half()] * 12


def added(layer: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """What comes out of the layer, and what its attention and its feed-forward add to x before it is rounded away."""
    parts: list[torch.Tensor] = []

    def note(_module, _inputs, out):
        parts.append(out if isinstance(out, torch.Tensor) else out[0])

    branches = [part for part in layer.children() if isinstance(part, Attention | FeedForward)]
    handles = [branch.register_forward_hook(note) for branch in branches]
    try:
        return Called(layer)(x), parts
    finally:
        for handle in handles:
            handle.remove()


def check_half(layers: list[nn.Module]) -> None:
    """AssertionError unless each layer adds in fp16 what it adds in fp32, and each of its weights gets its gradient."""
    x = (300 * torch.sign(torch.randn(1, 3, 4096))).half().requires_grad_()
    assert torch.isinf((x * x).mean(-1)).all()  # what a naive norm divides by
    exact = {id(layer): copy.deepcopy(layer).float() for layer in layers}
    out = x
    for layer in layers:
        with torch.no_grad():
            wanted = added(exact[id(layer)], out.detach().float())[1]
        out, found = added(layer, out)
        assert out.dtype == torch.float16
        assert torch.isfinite(out).all()
        assert len(found) == 2
        for ours, theirs in zip(found, wanted, strict=True):
            assert theirs.norm() > 0
            assert (ours.float() - theirs).norm() < 0.01 * theirs.norm()
    assert 250 < float(out.detach().abs().mean()) < 350
    # as a loss scale does, so that no gradient is below fp16's smallest number
    (2.0**10 * out.float().square().mean()).backward()
    for layer in {id(layer): layer for layer in layers}.values():
        for name, weight in layer.named_parameters():
            assert torch.isfinite(weight.grad).all(), name
            assert weight.grad.ne(0).any(), name
    assert torch.isfinite(x.grad).all()
    assert x.grad.ne(0).any()


@every_dialect
def test_fp16_adds_what_fp32_adds_through_12_layers_where_a_naive_mean_of_squares_overflows(dialect):
    torch.manual_seed(0)
    check_half(wide(dialect))


def test_the_check_sees_a_norm_whose_squares_overflow(monkeypatch):
    """Divided by infinity all is 0: finite everywhere, and no layer adds anything."""

    def naive(norm, x):
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + norm.eps) * norm.weight

    monkeypatch.setattr(RMSNorm, "forward", naive)
    torch.manual_seed(0)
    layers = wide("slm")
    x = (300 * torch.sign(torch.randn(1, 3, 4096))).half()
    assert torch.isfinite(Called(layers[0])(x)).all()
    with pytest.raises(AssertionError, match="norm"):
        check_half(layers)
