"""Muon in fp32, for where torch's, whose products are bfloat16 whatever the weights are, has no hardware."""

from collections.abc import Callable
from math import sqrt
from typing import Any

import torch
from torch import Tensor


class FullMuon(torch.optim.Muon):
    """torch.optim.Muon with adjust_lr_fn "match_rms_adamw", but all in the type of the gradients.

    A processor without bfloat16 products takes many times as long for them as for fp32's. Keeps the same state.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Move each matrix that has a gradient. Raises ValueError for a closure, which nobody here has."""
        if closure is not None:
            raise ValueError("FullMuon.step takes no closure")
        for group in self.param_groups:
            rate = float(group["lr"])
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(weight.grad)
                mean = state["momentum_buffer"].lerp_(weight.grad, 1 - group["momentum"])
                ahead = weight.grad.lerp(mean, group["momentum"])  # Nesterov
                update = orthogonalized(ahead, group["ns_coefficients"], steps=group["ns_steps"], epsilon=group["eps"])
                weight.mul_(1 - rate * group["weight_decay"])
                weight.add_(update, alpha=-rate * 0.2 * sqrt(max(weight.shape)))


def orthogonalized(
    matrix: Tensor, coefficients: tuple[float, float, float], *, steps: int, epsilon: float = 1e-7
) -> Tensor:
    """(R, C) -> (R, C): nearly U V^T of the singular value decomposition U S V^T, by the quintic Newton-Schulz
    iteration of Jordan et al. 2024, X <- a X + (b X X^T + c (X X^T)^2) X from X = matrix / its Frobenius norm."""
    a, b, c = coefficients
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=epsilon)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x
