"""AdamW over a decoder: which parameters decay, and its moments as named tensors."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from modicum.store import UserError

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


@dataclass(frozen=True)
class AdamW:
    """Settings of Loshchilov & Hutter 2019. clip_norm bounds the gradient's norm over all parameters together."""

    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    clip_norm: float = 1.0


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups for an optimizer: matrices of linear layers, which decay, and the rest, which does not.

    The rest is norms, biases and the embedding, which is also the head where the two are tied.
    """
    matrices = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    decaying = [weight for weight in model.parameters() if id(weight) in matrices]
    others = [weight for weight in model.parameters() if id(weight) not in matrices]
    return [{"params": decaying, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def make_optimizer(model: nn.Module, settings: AdamW) -> torch.optim.AdamW:
    """PyTorch's fused AdamW. Its learning rate is 0 until `set_rate`."""
    groups = parameter_groups(model, settings.weight_decay)
    return torch.optim.AdamW(groups, lr=0.0, betas=settings.betas, eps=settings.epsilon, fused=True)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """The learning rate of the next update, for all groups."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state by name, such as `model.norm.weight.exp_avg`; no copies."""
    return {
        f"{name}.{moment}": optimizer.state[weight][moment]
        for name, weight in model.named_parameters()
        for moment in _MOMENTS
        if weight in optimizer.state
    }


def restore_moments(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], origin: object
) -> None:
    """Put back what `moments` gave. `origin` names the file in the UserError for what is missing or misshapen."""
    faults = []
    for name, weight in model.named_parameters():
        state = {}
        for moment in _MOMENTS:
            found = tensors.get(f"{name}.{moment}")
            wanted = torch.Size() if moment == "step" else weight.shape
            if found is None or found.shape != wanted:
                faults.append(f"{origin}: {name}.{moment}: {'missing' if found is None else 'has another shape'}")
            else:
                state[moment] = found.to(weight.device, torch.float32, copy=True)
        optimizer.state[weight] = state
    if faults:
        raise UserError("\n".join([*faults, "take another checkpoint"]))
