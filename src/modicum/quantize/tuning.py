"""Tuning a model to its rounding: weights learn to say, when rounded, what the full model says.

The forward pass sees rounded weights, the backward pass goes straight through the rounding (Bengio et al. 2013), and
the step of each group learns with them (Esser et al. 2020, LSQ). The target is the full model's whole distribution.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from math import cos, pi
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, kl_div, linear

from modicum.model import Decoder
from modicum.model.packing import RoundedMatrix
from modicum.quantize.rounding import storable
from modicum.train.machine import has_fast_bfloat16

ROWS = 8  # of an update
# Of a matrix's mean step, by which an update moves a weight at most (AdamW): more makes numbers jump to and fro.
_SHARE, _SCALE_SHARE = 1e-3, 1e-4
_NORM_RATE = 1e-5
_INSIDE = 0.49  # of a step: just short of where the next number begins


class _Tuned(nn.Module):
    """A full matrix that is seen rounded; called as the linear layer or the embedding in whose place it stands."""

    def __init__(self, before: nn.Linear | nn.Embedding, matrix: RoundedMatrix) -> None:
        super().__init__()
        self.looks_up = isinstance(before, nn.Embedding)
        self.bits = matrix.bits
        self.scale = nn.Parameter(matrix.scale.clone())
        self.weight = nn.Parameter(_within(before.weight.detach(), matrix))
        self.bias = getattr(before, "bias", None)

    def rounded(self) -> Tensor:
        """The weights as they are seen, (outputs, inputs), with a gradient for weights and scales."""
        outputs, groups = self.scale.shape
        scale_OG1 = self.scale[:, :, None]
        half = 1 << (self.bits - 1)
        inside = (self.weight.view(outputs, groups, -1) / scale_OG1).clamp(-half, half - 1)
        whole = inside + (inside.round() - inside).detach()
        return (whole * scale_OG1).view_as(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return embedding(x, self.rounded()) if self.looks_up else linear(x, self.rounded(), self.bias)

    def project(self, x: Tensor) -> Tensor:
        return linear(x, self.rounded())

    @torch.no_grad()
    def matrix(self) -> RoundedMatrix:
        """What it has become, as files hold it."""
        scale = storable(self.scale.detach(), self.bits)
        outputs, groups = scale.shape
        half = 1 << (self.bits - 1)
        values = (self.weight.view(outputs, groups, -1) / scale[:, :, None]).round().clamp(-half, half - 1)
        return RoundedMatrix(values.view_as(self.weight).to(torch.int8), scale, self.bits)


def _within(weight_OI: Tensor, matrix: RoundedMatrix) -> Tensor:
    """The full weights, moved to where they are rounded to the matrix's numbers, and no further."""
    size = matrix.scale.repeat_interleave(weight_OI.shape[1] // matrix.scale.shape[1], 1)
    numbers = matrix.values.float()
    return torch.clamp(weight_OI / size, numbers - _INSIDE, numbers + _INSIDE) * size


def tune(
    teacher: Decoder,
    student: Decoder,
    matrices: dict[str, RoundedMatrix],
    rows: Sequence[Tensor],
    *,
    steps: int,
    say: Callable[[str], None],
) -> dict[str, RoundedMatrix]:
    """`steps` updates of the student, a copy of the teacher at full precision; its matrices, as they are rounded then.

    rows: ids (T,), all of one length, taken ROWS at a time, in their order, again from the front where they end. The
    student is tuned in place and stays at full precision.
    """
    before = {name: _module(student, name) for name in matrices}
    tuned = {name: _Tuned(before[name], matrix) for name, matrix in matrices.items()}
    for name, module in tuned.items():
        _put(student, name, module)
    student.eval().requires_grad_()  # without dropout, as the teacher speaks and as it will be asked
    groups: list[dict[str, Any]] = []
    for module in tuned.values():
        size = float(module.scale.detach().abs().mean())
        groups += [{"params": [module.weight], "peak": _SHARE * size}]
        groups += [{"params": [module.scale], "peak": _SCALE_SHARE * size}]
    known = {id(weight) for group in groups for weight in group["params"]}
    groups += [{"params": [p for p in student.parameters() if id(p) not in known], "peak": _NORM_RATE}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(steps):
        share = min(1.0, (step + 1) / max(1, steps // 10)) * (0.5 + 0.5 * cos(pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * share
        ids = torch.stack([rows[(step * ROWS + place) % len(rows)] for place in range(ROWS)])
        loss = _divergence(teacher, student, ids)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % max(1, steps // 10) == 0:
            say(f"tuning, update {step + 1} of {steps}: KL divergence {loss.item():.4f}")
    for name, module in tuned.items():
        before[name].weight = module.weight
        _put(student, name, before[name])
    student.eval().requires_grad_(False)
    return {name: module.matrix() for name, module in tuned.items()}


def _divergence(teacher: Decoder, student: Decoder, ids_BT: Tensor) -> Tensor:
    fast = has_fast_bfloat16(ids_BT.device.type)
    with torch.autocast(ids_BT.device.type, torch.bfloat16) if fast else nullcontext():
        with torch.no_grad():
            wanted = teacher(ids_BT)
        found = student(ids_BT)
    return kl_div(
        found.float().log_softmax(-1).flatten(0, 1),
        wanted.float().log_softmax(-1).flatten(0, 1),
        reduction="batchmean",
        log_target=True,
    )


def _put(model: Decoder, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def _module(model: Decoder, name: str) -> nn.Linear | nn.Embedding:
    module = model.get_submodule(name)
    assert isinstance(module, nn.Linear | nn.Embedding)
    return module
