"""Muon: momentum made orthogonal, matrix by matrix (Jordan et al. 2024), in three steps where PyTorch's takes five, and
the rows of an update made about equally long."""

from collections.abc import Iterable
from math import sqrt
from typing import Any

import torch
from torch import Tensor

# Each step is the odd quintic that is nearest 1 on the interval to which the steps before it bring [0.01, 1], which
# makes their composition the best there is (Amsel et al. 2025, "The Polar Express"): all of [0.01, 1] ends in
# [0.73, 1.27]. Jordan's one quintic needs five steps for [0.68, 1.2].
STEPS = (
    (8.0934, -23.6204, 17.4462),
    (3.6366, -2.7219, 0.5365),
    (2.6613, -1.9772, 0.4526),
)
_EXP_AVG_SQ_BETA = 0.95


class Muon(torch.optim.Optimizer):
    """For matrices: w <- (1 - lr weight_decay) w - lr 0.2 sqrt(longer side) evened(orthogonalized(momentum)).

    Momentum is Nesterov's; evened divides each row (a neuron's weights) by the root of its mean square over the last
    updates, and gives the whole its norm back (Li et al. 2025, "NorMuon"): an orthogonal matrix of more rows than
    columns moves some neurons much farther than others. The size is AdamW's (Liu et al. 2025, "Muon is Scalable for LLM
    Training").

    dtype: of the products; PyTorch's own Muon multiplies in bfloat16 always, for which a processor without such
    products takes many times as long as for fp32. Of a matrix (R, C) it keeps momentum_buffer (R, C) and exp_avg_sq
    (R, 1), in the dtype of the gradient.
    """

    def __init__(
        self, matrices: Iterable[Tensor], *, lr: float, weight_decay: float, momentum: float, dtype: torch.dtype
    ) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Move each matrix that has a gradient. Raises ValueError for a closure, which nobody here has."""
        if closure is not None:
            raise ValueError("Muon.step takes no closure")
        for group in self.param_groups:
            rate = float(group["lr"])
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(weight.grad)
                    state["exp_avg_sq"] = torch.zeros_like(weight.grad[:, :1])
                mean = state["momentum_buffer"].lerp_(weight.grad, 1 - group["momentum"])
                update = orthogonalized(weight.grad.lerp(mean, group["momentum"]).to(self._dtype))
                scales = evening(update, state["exp_avg_sq"])
                weight.mul_(1 - rate * group["weight_decay"])
                weight.addcmul_(update, scales, value=-rate * 0.2 * sqrt(max(weight.shape)))


def orthogonalized(matrix: Tensor) -> Tensor:
    """(R, C) -> (R, C), in its dtype: U P V^T of the singular value decomposition U S V^T, where P is in [0.73, 1.27],
    but for rounding, for all that S has above a hundredth of the matrix's Frobenius norm. Zeros stay zeros."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    norm = torch.linalg.vector_norm(x, dtype=torch.float32)
    x = x / (1.01 * norm).clamp(min=1e-7)  # 1.01: rounding does not take the largest singular value above 1
    for a, b, c in STEPS:
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)  # a x + (b g + c g^2) x
    return x.T if tall else x


def evening(update: Tensor, exp_avg_sq: Tensor) -> Tensor:
    """Factors (R, 1) for the rows of an update (R, C): 1 / sqrt(exp_avg_sq), rescaled so that the update's norm stays.

    exp_avg_sq (R, 1) takes in the rows' mean squares first, in place. That it begins with zeros is the same in all rows
    and falls out in the rescaling.
    """
    squares = torch.linalg.vector_norm(update, dim=1, keepdim=True, dtype=exp_avg_sq.dtype).square()
    exp_avg_sq.lerp_(squares / update.shape[1], 1 - _EXP_AVG_SQ_BETA)
    scales: Tensor = (exp_avg_sq + 1e-10).rsqrt()
    kept = squares.sum() / (squares * scales.square()).sum().clamp(min=1e-14)
    return scales.mul_(kept.sqrt())
