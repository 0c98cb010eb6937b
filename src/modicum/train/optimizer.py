"""AdamW, or Muon for the hidden matrices beside it: who is moved by which, and their moments as named tensors."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from modicum.store import UserError
from modicum.train.muon import Muon
from modicum.train.owners import Owners
from modicum.train.parallel import is_sharded, sharded_like

Kind = Literal["adamw", "muon"]

_MOMENTS: dict[type, tuple[str, ...]] = {
    torch.optim.AdamW: ("exp_avg", "exp_avg_sq", "step"),
    Muon: ("momentum_buffer", "exp_avg_sq"),
}


@dataclass(frozen=True)
class OptimizerSettings:
    """kind: "adamw" for all weights (Loshchilov & Hutter 2019), or "muon" for the matrices of the layers (Jordan et al.
    2024), each orthogonalised for itself, with AdamW for embedding, head, gains and biases.

    Muon's update is scaled to the size of AdamW's (Liu et al. 2025, "Muon is Scalable for LLM Training"), so both take
    the same weight decay. momentum is Muon's, and embedding_factor goes with it: what AdamW moves beside Muon learns at
    so many times the learning rate (10 was measured from fresh weights on). clip_norm bounds the gradient's norm over
    all parameters together.
    """

    kind: Kind = "adamw"
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    momentum: float = 0.95
    clip_norm: float = 1.0
    embedding_factor: float = 10.0


class Optimizer:
    """PyTorch's AdamW, with Muon beside it or not, handled as one. Its learning rate is 0 until `set_rate`.

    dtype: of the run's matrix products, which Muon's own are of too; its state is fp32 in any case. weights: every
    weight that is moved, each once. Where they are sharded, Muon moves the whole matrices of `Owners`, and all ranks
    call `step` and `moments` together.
    """

    def __init__(self, model: nn.Module, settings: OptimizerSettings, dtype: torch.dtype) -> None:
        hidden, decaying, others = _divided(model)
        self.weights: list[Tensor] = [*hidden, *decaying, *others]
        self._parts: list[torch.optim.Optimizer] = []
        self._owners: Owners | None = None
        factor = 1.0
        if settings.kind == "muon":
            if is_sharded(hidden[0]):
                self._owners = Owners(hidden)
            matrices = hidden if self._owners is None else self._owners.mine
            factor = settings.embedding_factor
            if matrices:  # a rank may own none
                decay, momentum = settings.weight_decay, settings.momentum
                self._parts.append(Muon(matrices, lr=0.0, weight_decay=decay, momentum=momentum, dtype=dtype))
        else:
            decaying = hidden + decaying
        groups: list[dict[str, Any]] = [
            # AdamW takes off the rate times the decay, which shall be the same whatever the factor
            {"params": decaying, "weight_decay": settings.weight_decay / factor, "factor": factor},
            {"params": others, "weight_decay": 0.0, "factor": factor},
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

    def set_rate(self, rate: float) -> None:
        """The learning rate of the next update, which embedding_factor multiplies for what stands beside Muon."""
        for group in self._groups():
            group["lr"] = rate * group.get("factor", 1.0)

    def step(self) -> None:
        """Move the weights by their gradients."""
        if self._owners is not None:
            self._owners.collect_gradients()
        for part in self._parts:
            part.step()
        if self._owners is not None:
            self._owners.hand_out()

    def zero_grad(self) -> None:
        """Let go of the gradients."""
        for weight in [*self.weights, *(self._owners.mine if self._owners is not None else [])]:
            weight.grad = None

    def moments(self, model: nn.Module) -> dict[str, Tensor]:
        """The state by name, such as `model.norm.weight.exp_avg`; no copies, but of what other ranks own."""
        found: dict[str, Tensor] = {}
        for name, weight in model.named_parameters():
            part, moved, moments = self._mover(weight)
            if part is not None and moved is weight and weight in part.state:
                found |= {f"{name}.{moment}": part.state[weight][moment] for moment in moments}
        if self._owners is not None:
            names = {id(weight): name for name, weight in model.named_parameters()}
            for moment in _MOMENTS[Muon]:
                kept = [self._parts[0].state[matrix][moment] for matrix in self._owners.mine]
                buffers = self._owners.as_sharded(kept, columns=1 if moment == "exp_avg_sq" else None)
                for weight, buffer in zip(self._owners.weights, buffers, strict=True):
                    found[f"{names[id(weight)]}.{moment}"] = buffer
        return found

    def restore_moments(self, model: nn.Module, tensors: Mapping[str, Tensor], origin: object) -> None:
        """Put back what `moments` gave, whole. `origin` names the file in the UserError for what is missing or
        misshapen."""
        faults = []
        for name, weight in model.named_parameters():
            part, moved, moments = self._mover(weight)
            state = {}
            for moment in moments:
                found = tensors.get(f"{name}.{moment}")
                wanted = _shape(moment, weight, of_muon="momentum_buffer" in moments)
                if found is None or found.shape != wanted:
                    faults.append(f"{origin}: {name}.{moment}: {'missing' if found is None else 'has another shape'}")
                elif moment == "step":
                    state[moment] = found.to(weight.device, torch.float32, copy=True)
                else:
                    state[moment] = sharded_like(found, moved)
            if part is not None:
                part.state[moved] = state
        if faults:
            raise UserError("\n".join([*faults, "take another checkpoint"]))

    def _groups(self) -> Iterable[dict[str, Any]]:
        return (group for part in self._parts for group in part.param_groups)

    def _mover(self, weight: Tensor) -> tuple[torch.optim.Optimizer | None, Tensor, tuple[str, ...]]:
        """The part that moves this weight, None where another rank does; what it moves: the weight, or the whole of it;
        and what it keeps."""
        moved = weight
        if self._owners is not None and id(weight) in self._owners.whole_of:
            own = self._owners.whole_of[id(weight)]
            if own is None:
                return None, weight, _MOMENTS[Muon]
            moved = own
        part = next(
            part
            for part in self._parts
            if any(moved is taken for group in part.param_groups for taken in group["params"])
        )
        return part, moved, _MOMENTS[type(part)]


def _shape(moment: str, weight: Tensor, *, of_muon: bool) -> torch.Size:
    if moment == "step":
        return torch.Size()
    return torch.Size((weight.shape[0], 1)) if of_muon and moment == "exp_avg_sq" else weight.shape


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
