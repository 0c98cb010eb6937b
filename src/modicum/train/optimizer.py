"""AdamW, or Muon for the hidden matrices beside it: who is moved by which, and their moments as named tensors."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from modicum.store import UserError
from modicum.train.muon import FullMuon
from modicum.train.owners import Owners
from modicum.train.parallel import is_sharded, sharded_like

Kind = Literal["adamw", "muon"]

_MOMENTS: dict[type, tuple[str, ...]] = {
    torch.optim.AdamW: ("exp_avg", "exp_avg_sq", "step"),
    torch.optim.Muon: ("momentum_buffer",),
    FullMuon: ("momentum_buffer",),
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
    """One or two of PyTorch's optimizers, handled as one. Its learning rate is 0 until `set_rate`.

    dtype: of the run's matrix products, which Muon's own are of too; its state is fp32 in any case. weights: every
    weight that is moved, each once. Where they are sharded, Muon moves the whole matrices of `Owners`, and all ranks
    call `step` and `moments` together.
    """

    def __init__(self, model: nn.Module, settings: OptimizerSettings, dtype: torch.dtype) -> None:
        hidden, decaying, others = _divided(model)
        self.weights: list[Tensor] = [*hidden, *decaying, *others]
        self._parts: list[torch.optim.Optimizer] = []
        self._owners: Owners | None = None
        if settings.kind == "muon":
            if is_sharded(hidden[0]):
                self._owners = Owners(hidden)
            matrices = hidden if self._owners is None else self._owners.mine
            muon = torch.optim.Muon if dtype == torch.bfloat16 else FullMuon
            if matrices:  # a rank may own none
                self._parts.append(
                    muon(
                        matrices,
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

    def set_rate(self, rate: float) -> None:
        """The learning rate of the next update, for all weights."""
        for group in self._groups():
            group["lr"] = rate

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
            kept = [self._parts[0].state[matrix]["momentum_buffer"] for matrix in self._owners.mine]
            buffers = self._owners.as_sharded(kept)
            for weight, buffer in zip(self._owners.weights, buffers, strict=True):
                found[f"{names[id(weight)]}.momentum_buffer"] = buffer
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
                wanted = torch.Size() if moment == "step" else weight.shape
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
                return None, weight, _MOMENTS[torch.optim.Muon]
            moved = own
        part = next(
            part
            for part in self._parts
            if any(moved is taken for group in part.param_groups for taken in group["params"])
        )
        return part, moved, _MOMENTS[type(part)]


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
