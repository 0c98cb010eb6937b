"""AdamW, or Muon for the hidden matrices beside it: who is moved by which, and their moments as named tensors."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from modicum.store import UserError

Kind = Literal["adamw", "muon"]

_MOMENTS: dict[type, tuple[str, ...]] = {
    torch.optim.AdamW: ("exp_avg", "exp_avg_sq", "step"),
    torch.optim.Muon: ("momentum_buffer",),
}


@dataclass(frozen=True)
class OptimizerSettings:
    """kind: "adamw" for all weights (Loshchilov & Hutter 2019), or "muon" for the matrices of the layers (Jordan et al.
    2024), each orthogonalised for itself, with AdamW for embedding, head, gains and biases.

    Muon's update is scaled to the size of AdamW's (Liu et al. 2025, "Muon is Scalable for LLM Training"), so both take
    the same learning rate and weight decay. momentum is Muon's. clip_norm bounds the gradient's norm over all
    parameters together.
    """

    kind: Kind = "adamw"
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    momentum: float = 0.95
    clip_norm: float = 1.0


class Optimizer:
    """One or two of PyTorch's optimizers, handled as one. Its learning rate is 0 until `set_rate`."""

    def __init__(self, model: nn.Module, settings: OptimizerSettings) -> None:
        hidden, decaying, others = _divided(model)
        self._parts: list[torch.optim.Optimizer] = []
        if settings.kind == "muon":
            self._parts.append(
                torch.optim.Muon(
                    hidden,
                    lr=0.0,
                    weight_decay=settings.weight_decay,
                    momentum=settings.momentum,
                    adjust_lr_fn="match_rms_adamw",
                )
            )
        else:
            decaying = hidden + decaying
        groups: list[dict[str, Any]] = [
            {"params": decaying, "weight_decay": settings.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        self._parts.append(
            torch.optim.AdamW(
                [group for group in groups if group["params"]],
                lr=0.0,
                betas=settings.betas,
                eps=settings.epsilon,
                fused=True,
            )
        )

    @property
    def weights(self) -> list[Tensor]:
        """Every weight that is moved, each once."""
        return [weight for group in self._groups() for weight in group["params"]]

    def set_rate(self, rate: float) -> None:
        """The learning rate of the next update, for all weights."""
        for group in self._groups():
            group["lr"] = rate

    def step(self) -> None:
        """Move the weights by their gradients."""
        for part in self._parts:
            part.step()

    def zero_grad(self) -> None:
        """Let go of the gradients."""
        for part in self._parts:
            part.zero_grad(set_to_none=True)

    def moments(self, model: nn.Module) -> dict[str, Tensor]:
        """The state by name, such as `model.norm.weight.exp_avg`; no copies."""
        return {
            f"{name}.{moment}": part.state[weight][moment]
            for name, weight in model.named_parameters()
            for part, moments in self._moments_of(weight)
            for moment in moments
            if weight in part.state
        }

    def restore_moments(self, model: nn.Module, tensors: Mapping[str, Tensor], origin: object) -> None:
        """Put back what `moments` gave. `origin` names the file in the UserError for what is missing or misshapen."""
        faults = []
        for name, weight in model.named_parameters():
            for part, moments in self._moments_of(weight):
                state = {}
                for moment in moments:
                    found = tensors.get(f"{name}.{moment}")
                    wanted = torch.Size() if moment == "step" else weight.shape
                    if found is None or found.shape != wanted:
                        faults.append(
                            f"{origin}: {name}.{moment}: {'missing' if found is None else 'has another shape'}"
                        )
                    else:
                        state[moment] = found.to(weight.device, torch.float32, copy=True)
                part.state[weight] = state
        if faults:
            raise UserError("\n".join([*faults, "take another checkpoint"]))

    def _groups(self) -> Iterable[dict[str, Any]]:
        return (group for part in self._parts for group in part.param_groups)

    def _moments_of(self, weight: Tensor) -> list[tuple[torch.optim.Optimizer, tuple[str, ...]]]:
        """The part that moves this weight, and what it keeps of it."""
        return [
            (part, _MOMENTS[type(part)])
            for part in self._parts
            if any(weight is moved for group in part.param_groups for moved in group["params"])
        ]


def _divided(model: nn.Module) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """The matrices of the layers; an untied head, which decays like them; and the rest, which does not decay.

    The rest is norms, biases and the embedding, which is also the head where the two are tied.
    """
    matrices = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    hidden: list[Tensor] = []
    decaying: list[Tensor] = []
    others: list[Tensor] = []
    for name, weight in model.named_parameters():
        if id(weight) not in matrices:
            others.append(weight)
        elif name == "lm_head.weight":
            decaying.append(weight)
        else:
            hidden.append(weight)
    return hidden, decaying, others
