"""Rotary position embedding (Su et al. 2021): queries and keys turn by an angle that grows with their position.

Angles and rotation are fp32 whatever the model's dtype is. The frequencies are no buffer on purpose: a buffer would be
rounded by `.bfloat16()`, and left unfilled by `.to_empty()`.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from modicum.model.config import ModelConfig
from modicum.model.frequencies import rotary_frequencies

Layout = Literal["half", "interleaved"]


class RotaryEmbedding(nn.Module):
    """The angles of positions; one for the whole decoder."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.layout: Layout = config.rotary_layout
        self.frequencies, self.factor = rotary_frequencies(
            config.head_dim, config.rope_theta, config.rope_scaling, config.max_position_embeddings
        )

    def forward(self, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
        """As `table`."""
        return self.table(positions_BT)

    def table(self, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
        """cos and signed sin of every channel, (B, 1, T, head_dim) fp32, with YaRN's attention factor multiplied in."""
        if self.frequencies.device != positions_BT.device:
            self.frequencies = self.frequencies.to(positions_BT.device)
        angles = positions_BT[:, None, :, None].float() * self.frequencies
        return spread(angles.cos() * self.factor, angles.sin() * self.factor, self.layout)


def spread(cos: Tensor, sin: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """cos and sin of each pair, (..., head_dim/2), as one number for every channel, (..., head_dim).

    The sine of a pair's first channel carries the minus sign, so that `rotate` is two products and a sum.
    """
    if layout == "half":
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    return torch.stack((cos, cos), dim=-1).flatten(-2), torch.stack((-sin, sin), dim=-1).flatten(-2)


def rotate(x_BHTK: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
    """Turn each channel pair of (B, H, T, head_dim) by its angle; fp32 inside, the input's dtype outside."""
    x = x_BHTK.float()
    if layout == "half":
        partner = torch.cat(x.chunk(2, dim=-1)[::-1], dim=-1)
    else:
        partner = torch.stack((x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
    return torch.addcmul(x * cos, partner, sin).to(x_BHTK.dtype)
