"""A matrix to whole numbers and scales: each scale searched for, and each column's error passed on to those after it.

The second is GPTQ (Frantar et al. 2022): inputs go together, so that what one column's rounding adds to an output, the
columns that are still to be rounded can take back. Counting a weight's error by the power of its input alone was tried
instead, and gained nothing.
"""

import torch
from torch import Tensor

from modicum.model.packing import BLOCK, RoundedMatrix

# Of the step that just holds the largest weight: a smaller one clips it, and serves the many others better.
_SHARES = torch.linspace(0.6, 1.0, 17)
_DAMPING = 0.01  # of the mean power: inputs that never differ must not divide by nothing


def round_matrix(weight_OI: Tensor, bits: int, moments_II: Tensor | None = None) -> RoundedMatrix:
    """8 bits: one scale a row, float32. 4 bits: one for every 32 inputs, a float16's value; inputs must divide by 32.

    moments: the mean of the products of any two inputs; without it each number is the nearest.
    """
    outputs, inputs = weight_OI.shape
    group = inputs if bits == 8 else BLOCK
    weight = weight_OI.float()
    scale_OG = _best_scale(weight.reshape(-1, group), bits).view(outputs, -1)
    if moments_II is None:
        values = _nearest(weight.view(outputs, -1, group), scale_OG[:, :, None], bits).view(outputs, inputs)
    else:
        values = _passed_on(weight, scale_OG.repeat_interleave(group, 1), bits, moments_II)
    return RoundedMatrix(values.to(torch.int8), scale_OG, bits)


def storable(scale: Tensor, bits: int) -> Tensor:
    """As files hold it; never zero, which nothing can be divided by."""
    kept = scale if bits == 8 else scale.half().float()
    return torch.where(kept == 0, torch.ones_like(kept), kept)


def _passed_on(weight_OI: Tensor, scale_OI: Tensor, bits: int, moments_II: Tensor) -> Tensor:
    """Whole numbers, column by column; a block's errors reach the columns behind it together."""
    damping = _DAMPING * moments_II.diagonal().mean() + torch.finfo(torch.float32).tiny
    damped = moments_II.double() + damping.double() * torch.eye(len(moments_II), dtype=torch.float64)
    inverse = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True).float()
    left, values = weight_OI.clone(), torch.empty_like(weight_OI)
    for start in range(0, left.shape[1], BLOCK):
        stop = min(start + BLOCK, left.shape[1])
        errors = torch.empty(len(left), stop - start)
        for at in range(start, stop):
            values[:, at] = _nearest(left[:, at], scale_OI[:, at], bits)
            error = (left[:, at] - values[:, at] * scale_OI[:, at]) / inverse[at, at]
            left[:, at:stop] -= error[:, None] * inverse[at, at:stop]
            errors[:, at - start] = error
        left[:, stop:] -= errors @ inverse[start:stop, stop:]
    return values


def _best_scale(weight_NG: Tensor, bits: int) -> Tensor:
    """The scale of each group with the least sum of squared errors; ties go to the one that clips least."""
    lowest = 1 << (bits - 1)
    # where the number range has one more below zero, the largest weight takes it, whatever its sign
    extreme = weight_NG.gather(1, weight_NG.abs().argmax(1, keepdim=True))[:, 0] / -lowest
    best, least = torch.ones_like(extreme), torch.full_like(extreme, torch.inf)
    for share in reversed(_SHARES.tolist()):
        for start in (extreme, extreme.abs() * lowest / (lowest - 1)):
            scale = storable(start * share, bits)
            total = (weight_NG - _nearest(weight_NG, scale[:, None], bits) * scale[:, None]).square().sum(1)
            better = total < least
            best, least = torch.where(better, scale, best), torch.where(better, total, least)
    return best


def _nearest(weight: Tensor, scale: Tensor, bits: int) -> Tensor:
    half = 1 << (bits - 1)
    return (weight / scale).round().clamp(-half, half - 1)
