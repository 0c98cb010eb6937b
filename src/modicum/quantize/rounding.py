"""A matrix to whole numbers and scales, each scale searched for the least error that its inputs will see."""

import torch
from torch import Tensor

from modicum.model.packing import BLOCK, RoundedMatrix

# Of the step that just holds the largest weight: a smaller one clips it, and serves the many others better.
_SHARES = torch.linspace(0.6, 1.0, 17)


def round_matrix(weight_OI: Tensor, bits: int, importance_I: Tensor | None = None) -> RoundedMatrix:
    """8 bits: one scale a row, float32. 4 bits: one for every 32 inputs, a float16's value; inputs must divide by 32.

    importance: the mean square of each input, which the square of a weight's error counts for; by default all alike.
    """
    outputs, inputs = weight_OI.shape
    group = inputs if bits == 8 else BLOCK
    weight_NG = weight_OI.float().reshape(-1, group)
    importance = torch.ones(inputs) if importance_I is None else importance_I.float()
    counts = importance.reshape(1, -1, group).expand(outputs, -1, group).reshape(-1, group)
    scale_N = _best_scale(weight_NG, counts, bits)
    values = _nearest(weight_NG, scale_N, bits)
    return RoundedMatrix(values.reshape(outputs, inputs).to(torch.int8), scale_N.reshape(outputs, -1), bits)


def _best_scale(weight_NG: Tensor, counts_NG: Tensor, bits: int) -> Tensor:
    """The scale of each group with the least sum of counted squares; ties go to the one that clips least."""
    lowest = 1 << (bits - 1)
    # where the number range has one more below zero, the largest weight takes it, whatever its sign
    extreme = weight_NG.gather(1, weight_NG.abs().argmax(1, keepdim=True))[:, 0] / -lowest
    best, least = torch.ones_like(extreme), torch.full_like(extreme, torch.inf)
    for share in reversed(_SHARES.tolist()):
        for start in (extreme, extreme.abs() * lowest / (lowest - 1)):
            scale = storable(start * share, bits)
            error = weight_NG - _nearest(weight_NG, scale, bits) * scale[:, None]
            total = (error.square() * counts_NG).sum(1)
            better = total < least
            best, least = torch.where(better, scale, best), torch.where(better, total, least)
    return best


def storable(scale: Tensor, bits: int) -> Tensor:
    """As files hold it; never zero, which nothing can be divided by."""
    kept = scale if bits == 8 else scale.half().float()
    return torch.where(kept == 0, torch.ones_like(kept), kept)


def _nearest(weight_NG: Tensor, scale_N: Tensor, bits: int) -> Tensor:
    half = 1 << (bits - 1)
    return (weight_NG / scale_N[:, None]).round().clamp(-half, half - 1)
