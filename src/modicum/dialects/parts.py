"""What dialects share: renamed sub-modules, one rotary table for all layers, state dicts that fit or are refused."""

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from modicum.model import ModelConfig
from modicum.model.linear import check_ids
from modicum.model.rotary import RotaryEmbedding
from modicum.model.values import shown
from modicum.store import UserError

Config = TypeVar("Config")

STD = 0.02  # of fresh weights, where a dialect's config does not say


def alias(name: str) -> Any:
    """A property that reads the sub-module `name`, for the name that the adapted class knows it by."""
    return property(lambda module: getattr(module, name))


def rename(module: nn.Module, **names: str) -> None:
    """Register the sub-modules under other names, in the same order; `alias` lets the old ones be read."""
    module._modules = {names.get(name, name): part for name, part in module._modules.items()}


def shared_rope(rope: RotaryEmbedding | None, config: ModelConfig) -> RotaryEmbedding:
    """The given table, or one of the block's own. ValueError for one of another layout or head size."""
    if rope is None:
        return RotaryEmbedding(config)
    width = 2 * rope.frequencies.numel()
    if rope.layout != config.rotary_layout or width != config.head_dim:
        raise ValueError(
            f"the rotary table is for heads of {width} in the {rope.layout} layout, "
            f"the block has heads of {config.head_dim} in the {config.rotary_layout} one"
        )
    return rope


def read_config(kind: type[Config], values: Mapping[str, Any], optional: Collection[str]) -> Config:
    """The config dataclass `kind` from plain values. UserError lists every unknown and every missing key, or every
    value that is none of None, bool, int, float and str: nothing is computed with such a one, a tensor say.

    Only `optional` keys may be left out: a default taken in silence for the number of heads, say, gives a model that
    loads and babbles.
    """
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]  # every caller passes a dataclass
    faults = [f"{name}: missing" for name in sorted(names - values.keys() - set(optional))]
    faults += [f"{name}: unknown" for name in sorted(values.keys() - names)]
    faults = faults or [
        f"{name}: expected a plain value, not a {type(value).__name__} {shown(value)}"
        for name, value in sorted(values.items())
        if value is not None and not isinstance(value, bool | int | float | str)
    ]
    if faults:
        raise UserError("\n".join([f"the config is not that of a {kind.__name__}:", *(f"  {line}" for line in faults)]))
    return kind(**values)


def interleaved_settings(*, bias: bool, **values: Any) -> ModelConfig:
    """modicum's own settings of a model with interleaved rotary pairs and one switch for all its biases."""
    return ModelConfig(**values, attention_bias=bias, mlp_bias=bias, initializer_range=STD, rotary_layout="interleaved")


def check_length(tokens: int, limit: int, name: str) -> None:
    """UserError when a sequence is longer than the model's positions. Nothing in compiled code, which keeps it open."""
    if not torch.compiler.is_compiling() and tokens > limit:
        raise UserError(f"a sequence of {tokens} tokens is longer than the model's {limit} positions ({name})")


class StrictModule(nn.Module):
    """A module that takes its own state dict or none."""

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As nn.Module's, but nothing is loaded, and UserError lists every name, where one is amiss and `strict`."""
        faults = self.faults(state_dict) if strict else []
        if faults:
            heading = f"this state dict is not that of the {type(self).__name__}; nothing was loaded:"
            raise UserError("\n".join([heading, *(f"  {fault}" for fault in faults)]))
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def faults(self, state: Mapping[str, Any]) -> list[str]:
        """What is amiss with a state dict for this module, a line for each name."""
        wanted = {name: list(value.shape) for name, value in self.state_dict().items()}
        found = {name: list(getattr(value, "shape", ["none"])) for name, value in state.items()}
        return [
            *(f"{name}: missing" for name in sorted(wanted.keys() - found.keys())),
            *(f"{name}: not part of this model" for name in sorted(found.keys() - wanted.keys())),
            *(
                f"{name}: has shape {found[name]}, expected {shape}"
                for name, shape in sorted(wanted.items())
                if name in found and found[name] != shape
            ),
        ]


class WholeModel(StrictModule):
    """Embedding, blocks, last norm and head. A tied head is the embedding itself and not in the state dict.

    table: the embedding's attribute name.
    """

    table: ClassVar[str]
    lm_head: nn.Module | None

    def embed(self, ids_BT: Tensor) -> Tensor:
        """(B, T, hidden) of ids (B, T). Outside of compiled code an id beyond the vocabulary raises UserError."""
        table = getattr(self, self.table)
        if not torch.compiler.is_compiling():
            check_ids(ids_BT, table.num_embeddings)
        out: Tensor = table(ids_BT)
        return out

    def head(self, hidden_BTD: Tensor) -> Tensor:
        """Logits (B, T, V)."""
        if self.lm_head is None:
            return linear(hidden_BTD, getattr(self, self.table).weight)
        out: Tensor = self.lm_head(hidden_BTD)
        return out

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As StrictModule's. A tied model takes a state with `lm_head.weight` too, where it equals the embedding."""
        head, table = state_dict.get("lm_head.weight"), state_dict.get(f"{self.table}.weight")
        if self.lm_head is None and head is not None and table is not None and torch.equal(head, table):
            state_dict = {name: value for name, value in state_dict.items() if name != "lm_head.weight"}
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def faults(self, state: Mapping[str, Any]) -> list[str]:
        """As StrictModule's."""
        tied = "lm_head.weight: not part of this model"
        reason = f"{tied}, whose head is {self.table}.weight by its config" if self.lm_head is None else tied
        return [reason if fault == tied else fault for fault in super().faults(state)]
