"""The two ways of pairing a head's channels for the rotary embedding, and weights from one to the other.

"half" turns the channels (i, i + head_dim/2) of a head together, "interleaved" (2i, 2i + 1). A model in the wrong one
loads and degrades, so this is the only place where rows change their order.
"""

from collections.abc import Mapping
from typing import Literal

from torch import Tensor

Layout = Literal["half", "interleaved"]

# What is rotated, or scales what is rotated; one row or number a channel, head after head.
_ROTATED = (
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.q_proj.bias",
    "self_attn.k_proj.bias",
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
)


def relaid(weights: Mapping[str, Tensor], *, head_dim: int, source: Layout, target: Layout) -> dict[str, Tensor]:
    """A state dict under our names, its queries' and keys' rows in the `target` order. The rest is the same tensors."""
    if source == target:
        return dict(weights)
    change = to_half if target == "half" else to_interleaved
    return {name: change(weight, head_dim) if name.endswith(_ROTATED) else weight for name, weight in weights.items()}


def to_half(rows: Tensor, head_dim: int) -> Tensor:
    """(heads * head_dim, ...) from the interleaved to the half order, each head for itself; a copy."""
    return rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def to_interleaved(rows: Tensor, head_dim: int) -> Tensor:
    """(heads * head_dim, ...) from the half to the interleaved order, each head for itself; a copy."""
    return rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
