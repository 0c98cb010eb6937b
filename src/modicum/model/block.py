"""One pre-norm layer: x + attention(norm(x)), then x + feed_forward(norm(x)); and what of it a backward pass finds."""

import logging
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from modicum.model.attention import Attention
from modicum.model.config import ModelConfig
from modicum.model.mlp import FeedForward
from modicum.model.norm import RMSNorm
from modicum.model.plan import AttentionPlan

ActivationCheckpointing = Literal["none", "selective", "full"]

# What "selective" keeps: results that take long to compute for their size. All else is made again from them, the
# products of query blocks too (bmm): their scores are the largest tensors of a layer.
_KEPT = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
]
_keeping = partial(create_selective_checkpoint_contexts, _KEPT)
# by which the compiler knows code of another process again; without it, it makes it anew in each
_keeping.cache_hash = " ".join(map(str, _KEPT))  # type: ignore[attr-defined]
# It warns that a block must not work in place, which ours does not.
logging.getLogger("torch._higher_order_ops.wrap").addFilter(
    lambda record: not record.getMessage().startswith("\nDetected that context_fn is passed")
)


class DecoderBlock(nn.Module):
    """Sub-modules and their names are Hugging Face's.

    activation_checkpointing: what is kept for the backward pass: all that it needs ("none"); the input, and what linear
    layers and PyTorch's attention kernels give ("selective"); the input alone ("full"). The rest is computed once more.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.activation_checkpointing: ActivationCheckpointing = "none"
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, x_BTD: Tensor, plan: AttentionPlan) -> tuple[Tensor, Tensor | None]:
        """The residual stream (B, T, hidden) after this layer, and its attention weights where the plan wants them."""
        if self.activation_checkpointing == "none" or plan.cached or not torch.is_grad_enabled():
            return self._layer(x_BTD, plan)
        how: dict[str, Any] = {"context_fn": _keeping} if self.activation_checkpointing == "selective" else {}
        result: tuple[Tensor, Tensor | None] = checkpoint(self._layer, x_BTD, plan, use_reentrant=False, **how)
        return result

    def _layer(self, x_BTD: Tensor, plan: AttentionPlan) -> tuple[Tensor, Tensor | None]:
        attended, weights = self.self_attn(self.input_layernorm(x_BTD), plan)
        x_BTD = x_BTD + attended
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD)), weights
