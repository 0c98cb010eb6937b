"""Where foreign weights lie, and what they claim to be: names, shapes and types first, the numbers when asked for.

safetensors, torch files, and folders of either, in one file or in shards with an index; nothing in them is executed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from modicum.exchange.torch_file import is_mapping_of_tensors, read_torch_file
from modicum.store import UserError, read_json

# In the order in which transformers looks; the last is our own export's.
_USUAL = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "model.pt",
)
_WRAPPINGS = ("_orig_mod.", "module.")
_SAFE_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Claim:
    """What a file says of a tensor. dtype None: of a kind that is no weight's."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None


@dataclass(frozen=True)
class Stored:
    """Weights as they lie: `origin` is their file or folder, `size` its bytes, `config` what lies in the file; notes:
    what was done to their names."""

    origin: Path
    size: int
    claims: Mapping[str, Claim]
    read: Callable[[], dict[str, Tensor]]
    config: Any = None
    left_aside: tuple[str, ...] = field(default=())
    notes: tuple[str, ...] = field(default=())


def find_stored(path: Path) -> Stored:
    """The weights at `path`: a file, or a folder with one set of them; without the prefix of a compiled or a wrapped
    module. Raises UserError, naming what is wrong."""
    return _unwrapped(_found(path))


def _found(path: Path) -> Stored:
    if path.is_file():
        return _one_file(path)
    if not path.is_dir():
        raise UserError(f"{path}: no such file or folder; expected a checkpoint's file, or the folder it lies in")
    for file in (path / name for name in _USUAL):
        if file.is_file():
            return _sharded(file) if file.suffix == ".json" else _one_file(file)
    found = sorted(file for file in path.iterdir() if file.suffix in (".safetensors", ".pt", ".pth", ".bin"))
    if len(found) != 1:
        several = f"several files that may hold the weights ({', '.join(file.name for file in found)})"
        raise UserError(
            f"{path}: has {several if found else 'no file of weights (.safetensors, .pt, .pth or .bin)'}; name the file"
        )
    return _one_file(found[0])


def _unwrapped(stored: Stored) -> Stored:
    """Without what torch.compile or DistributedDataParallel puts before every name, where every name has it."""
    prefix, names = "", list(stored.claims)
    while names and (more := next((w for w in _WRAPPINGS if all(n.startswith(prefix + w) for n in names)), None)):
        prefix += more
    if not prefix:
        return stored

    def plain(named: Mapping[str, Any]) -> dict[str, Any]:
        return {name.removeprefix(prefix): value for name, value in named.items()}

    note = f"every name began with {prefix}, as a compiled or wrapped module's do; it was taken off"
    return replace(stored, claims=plain(stored.claims), read=lambda: plain(stored.read()), notes=(*stored.notes, note))


def _one_file(path: Path) -> Stored:
    if not path.is_file():
        raise UserError(f"{path}: missing, or no regular file")
    return _safetensors(path) if path.suffix == ".safetensors" else _torch(path)


def _safetensors(path: Path) -> Stored:
    with _opened(path) as tensors:
        slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
        claims = {
            name: Claim(tuple(part.get_shape()), _SAFE_DTYPES.get(part.get_dtype())) for name, part in slices.items()
        }

    def read() -> dict[str, Tensor]:
        with _opened(path) as tensors:
            return {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118

    return Stored(path, path.stat().st_size, claims, read)


def _opened(path: Path) -> Any:
    """safetensors checks that the header is small, that shapes fit offsets, and that offsets cover the file once."""
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise UserError(f"{path}: not a whole safetensors file ({error}); copy it again") from None


def _torch(path: Path) -> Stored:
    claimed = read_torch_file(path, only_shapes=True)
    inside, config, left_aside = _parts(claimed, path)
    claims = {
        name: Claim(tuple(tensor.shape), tensor.dtype if _is_weight(tensor) else None)
        for name, tensor in inside.items()
    }

    def read() -> dict[str, Tensor]:
        tensors, _, _ = _parts(read_torch_file(path, only_shapes=False), path)
        return {name: tensor.detach() for name, tensor in tensors.items()}

    return Stored(path, path.stat().st_size, claims, read, config, left_aside)


def _parts(content: Any, path: Path) -> tuple[Mapping[str, Tensor], Any, tuple[str, ...]]:
    """The state dict, the config beside it in the file, and what else lies there unread."""
    if isinstance(content, Mapping) and "model_state" in content:
        others = tuple(sorted(str(name) for name in content.keys() - {"model_state", "config"}))
        content, config = content["model_state"], content.get("config")
    else:
        others, config = (), None
    if is_mapping_of_tensors(content) and content:
        return content, config, others
    if not isinstance(content, Mapping) or not content:
        raise UserError(f"{path}: expected a mapping with model_state and config, or a state dict of tensors")
    wrong = [name for name, value in content.items() if not isinstance(name, str) or not isinstance(value, Tensor)]
    raise UserError(
        f"{path}: expected tensors by name; {wrong[0]!r} holds a {type(content[wrong[0]]).__name__}"
        f"{f' ({len(wrong)} of {len(content)} entries are no tensors)' if len(wrong) > 1 else ''}"
    )


def _is_weight(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.dtype in _SAFE_DTYPES.values()


def _sharded(index: Path) -> Stored:
    """A folder of shards, checked against the index before a number is read."""
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(place, str) for place in places.values()) or not places:
        raise UserError(f"{index}: expected a weight_map of names to files")
    outside = sorted({place for place in places.values() if Path(place).name != place or place in ("", ".", "..")})
    if outside:
        raise UserError(f"{index}: names a file outside its folder: {', '.join(map(repr, outside))}")
    missing = sorted({place for place in places.values() if not (index.parent / place).is_file()})
    if missing:
        raise UserError(f"{index}: names {', '.join(missing)}, which {index.parent} does not have; copy it again")
    shards = {place: _one_file(index.parent / place) for place in sorted(set(places.values()))}
    faults = [
        f"{name}: not in {place}" for name, place in sorted(places.items()) if name not in shards[place].claims
    ] + [
        f"{name}: in {place}, {f'but the index says {places[name]}' if name in places else 'but not in the index'}"
        for place, shard in shards.items()
        for name in sorted(shard.claims)
        if places.get(name) != place
    ]
    if faults:
        raise UserError("\n".join([f"{index}: disagrees with its files", *(f"  {fault}" for fault in faults)]))
    claims = {name: claim for shard in shards.values() for name, claim in shard.claims.items()}

    def read() -> dict[str, Tensor]:
        return {name: tensor for shard in shards.values() for name, tensor in shard.read().items()}

    return Stored(index.parent, sum(shard.size for shard in shards.values()), claims, read)
