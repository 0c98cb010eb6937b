"""A foreign checkpoint read whole: our names, finite numbers of one type, and the rotary layout they came in.

Every tensor is accounted for; what is missing, left over or of the wrong shape is one error that lists all of it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modicum.exchange.described import Described, describe
from modicum.exchange.names import EMBEDDING, HEAD, Dialect, foreign_names, shown, weight_shapes
from modicum.exchange.stored import Stored, find_stored
from modicum.model import ModelConfig
from modicum.model.values import shown as value_shown
from modicum.store import UserError, read_json

# Llamas of before 2023 carry a table that their config gives as well; transformers passes over it too.
_TABLES = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


@dataclass(frozen=True)
class Foreign:
    """config.rotary_layout is that of `weights`, which have our names and the type they were stored in; those of a
    checkpoint with several types are float32. left_aside: what else lay in its file. token_ids: which token begins and
    ends a text, by its config; notes: what was done to it, and what of it is lost."""

    origin: Path
    architecture: str
    config: ModelConfig
    weights: dict[str, Tensor]
    left_aside: tuple[str, ...]
    token_ids: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def read_foreign(path: Path, dialect: Dialect) -> Foreign:
    """The checkpoint at `path`, a file or a folder; its config in the file, or in a config.json beside it; where there
    are both they must agree.

    Raises UserError, naming file and tensor, for whatever is not exactly such a model. Executes nothing.
    """
    stored = find_stored(path)
    beside = (path if path.is_dir() else path.parent) / "config.json"
    if stored.config is not None and dialect != "hf":
        described = describe(stored.config, dialect, f"{stored.origin}: config")
        if beside.exists():
            _check_beside(stored.config, read_json(beside), f"{stored.origin} and {beside}")
    elif beside.exists():
        described = describe(read_json(beside), dialect, str(beside))
    else:
        raise UserError(f"{stored.origin}: no config in it and no config.json beside it; put the model's config there")
    weights = read_weights(stored, described, dialect)
    return Foreign(
        stored.origin,
        described.architecture,
        described.config,
        weights,
        stored.left_aside,
        described.token_ids,
        (*stored.notes, *described.notes),
    )


def _check_beside(inside: Mapping[str, Any], beside: Mapping[str, Any], origins: str) -> None:
    """Refuse two configs of one model that say different things of a key that both have."""
    faults = [
        f"{name}: {value_shown(inside[name])} in the file of the weights, {value_shown(beside[name])} in config.json"
        for name in sorted(inside.keys() & beside.keys())
        if inside[name] != beside[name]
    ]
    if faults:
        heading = f"{origins}: two configs that disagree; correct one, or move config.json away"
        raise UserError("\n".join([heading, *(f"  {fault}" for fault in faults)]))


def read_weights(stored: Stored, described: Described, dialect: Dialect) -> dict[str, Tensor]:
    """The weights under our names, when they are exactly those of the config. Raises UserError listing all others."""
    config, claims = described.config, stored.claims
    if config.num_hidden_layers > len(claims):
        raise UserError(
            f"{stored.origin}: the config asks for {config.num_hidden_layers:,} layers, but there are {len(claims)} "
            "tensors; they are not of one model"
        )
    shapes = weight_shapes(config)
    theirs_to_ours = foreign_names(dialect, config)
    names = {theirs: ours for theirs, ours in theirs_to_ours.items() if not ours.endswith(described.lacking)}
    _check_claims(stored, config, names, shapes)
    tensors = {name: tensor for name, tensor in stored.read().items() if name in names or name == HEAD}
    broken = [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]
    if broken:
        faults = [f"  {name}: holds NaN or infinity" for name in broken]
        raise UserError("\n".join([f"{stored.origin}: its weights are no numbers", *faults]))
    weights = {ours: tensors[theirs] for theirs, ours in names.items()}
    _refuse_shared({name: tensors[name] for name in names}, stored.origin)
    if config.tie_word_embeddings and HEAD in tensors and not torch.equal(tensors[HEAD], weights[EMBEDDING]):
        raise UserError(
            f"{stored.origin}: {HEAD} differs from the embedding, but the config says that they are tied; it does not "
            "belong to these weights"
        )
    kinds = {tensor.dtype for tensor in weights.values()}
    if len(kinds) > 1:
        weights = {name: tensor.float() for name, tensor in weights.items()}
    (kind,) = {tensor.dtype for tensor in weights.values()}
    zeros = [name for name in shapes if name.endswith(described.lacking)]
    return weights | {name: torch.zeros(shapes[name], dtype=kind) for name in zeros}


def _refuse_shared(tensors: Mapping[str, Tensor], origin: Path) -> None:
    """Refuse weights that lie over one another in memory: tied where they come from, they would be free here."""
    places = []
    for name, tensor in tensors.items():
        span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        places.append((tensor.data_ptr(), tensor.data_ptr() + span * tensor.itemsize, name))
        if span < tensor.numel():
            places.append(places[-1])
    faults, (_, end, owner) = [], (0, 0, "")
    for start, stop, name in sorted(places):
        if start < end:
            faults.append(f"{owner} and {name}" if owner != name else f"{name} and itself")
        if stop > end:
            end, owner = stop, name
    if faults:
        heading = f"{origin}: weights that share their memory; save each as a tensor of its own (tensor.clone())"
        raise UserError("\n".join([heading, *(f"  {fault}" for fault in faults)]))


def _check_claims(
    stored: Stored, config: ModelConfig, names: dict[str, str], shapes: dict[str, tuple[int, ...]]
) -> None:
    """Compare what the files claim with what the config asks for, before a number is read."""
    wanted = {theirs: shapes[ours] for theirs, ours in names.items()}
    claims = {name: claim for name, claim in stored.claims.items() if not _TABLES.fullmatch(name)}
    if config.tie_word_embeddings and HEAD in claims:
        wanted[HEAD] = shapes[EMBEDDING]
    faults = [f"{name}: missing" for name in wanted if name not in claims]
    faults += [
        f"{shown(name)}: left over, this model has no such weight" for name in sorted(claims) if name not in wanted
    ]
    faults += [
        f"{name}: has shape {list(claims[name].shape)}, the config asks for {list(shape)}"
        for name, shape in wanted.items()
        if name in claims and claims[name].shape != shape
    ]
    faults += [
        f"{name}: is no plain tensor of float32, float16 or bfloat16"
        for name in wanted
        if name in claims and claims[name].dtype is None
    ]
    if faults:
        raise UserError("\n".join([f"{stored.origin}: not the weights of its config", *(f"  {f}" for f in faults)]))
    needed = sum(_bytes(shape, claims[name].dtype) for name, shape in wanted.items() if names.get(name))
    if needed > stored.size:
        raise UserError(
            f"{stored.origin}: {stored.size:,} bytes cannot hold weights of {needed:,}: its tensors share their memory"
        )


def _bytes(shape: tuple[int, ...], dtype: torch.dtype | None) -> int:
    count = 1
    for size in shape:
        count *= size
    return count * (dtype.itemsize if dtype is not None else 0)
