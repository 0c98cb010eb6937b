"""Rounded weights in the layout that the kernel reads: panels of sixteen outputs, unsigned, a zero in the middle.

Whole numbers (outputs, inputs) int8 go in and come out; what does not fill a panel or a block is filled up with zeros.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK, LANES = 32, 16


@dataclass(frozen=True)
class RoundedMatrix:
    """A matrix (outputs, inputs): whole numbers of 8 or 4 bits, int8, times scale, float32 (outputs, groups).

    A row is one group, or its inputs are grouped by BLOCK. Raises ValueError for sizes that do not belong together.
    """

    values: Tensor
    scale: Tensor
    bits: int

    def __post_init__(self) -> None:
        outputs, inputs = self.values.shape
        if self.bits not in (4, 8) or tuple(self.scale.shape) not in ((outputs, 1), (outputs, -(-inputs // BLOCK))):
            raise ValueError(
                f"{self.bits} bits, {tuple(self.values.shape)} numbers and {tuple(self.scale.shape)} scales"
            )

    def wide(self) -> Tensor:
        """float32 (outputs, inputs): each number times the scale of its group."""
        numbers = self.values.float()
        if self.scale.shape[1] == 1:
            return numbers * self.scale
        return numbers * self.scale.repeat_interleave(BLOCK, 1)[:, : numbers.shape[1]]


def pack_values(values_OI: Tensor, bits: int) -> Tensor:
    """uint8 (panels, inputs/4, 16, 4) of 8-bit numbers; of 4-bit ones (panels, inputs/8, 16, 4), two in a byte."""
    outputs, inputs = values_OI.shape
    zero = 1 << (bits - 1)
    shifted = torch.full((_up(outputs, LANES), _up(inputs, BLOCK)), zero, dtype=torch.uint8, device=values_OI.device)
    shifted[:outputs, :inputs] = (values_OI.to(torch.int16) + zero).to(torch.uint8)
    panels = shifted.view(-1, LANES, shifted.shape[1] // 4, 4).transpose(1, 2).contiguous()
    return panels if bits == 8 else panels[:, ::2] | (panels[:, 1::2] << 4)


def unpack_values(packed: Tensor, bits: int, outputs: int, inputs: int) -> Tensor:
    """The whole numbers (outputs, inputs) int8 that were packed."""
    halves = packed if bits == 8 else torch.stack([packed & 15, packed >> 4], 2).flatten(1, 2)
    shifted = halves.transpose(1, 2).reshape(halves.shape[0] * LANES, -1)[:outputs, :inputs]
    return (shifted.to(torch.int16) - (1 << (bits - 1))).to(torch.int8)


def pack_scale(scale_OG: Tensor) -> Tensor:
    """float32 (panels, groups, 16) of (outputs, groups)."""
    outputs, groups = scale_OG.shape
    filled = torch.zeros(_up(outputs, LANES), groups, device=scale_OG.device)
    filled[:outputs] = scale_OG
    return filled.view(-1, LANES, groups).transpose(1, 2).contiguous()


def unpack_scale(packed: Tensor, outputs: int) -> Tensor:
    """The scales (outputs, groups) that were packed."""
    return packed.transpose(1, 2).reshape(-1, packed.shape[1])[:outputs]


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
