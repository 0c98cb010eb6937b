"""What lies in a written GGUF file, read by the gguf package and held against the checkpoint, bit for bit.

Where it differs, the likeliest cause is named: the rows of another layout, another tensor's numbers, a changed scale.
"""

from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch

from modicum.exchange.gguf_metadata import LAYOUTS, architecture_of
from modicum.exchange.gguf_vocabulary import Value
from modicum.exchange.gguf_weights import TYPES, FileTensor, gguf_library
from modicum.exchange.layouts import relaid
from modicum.exchange.names import HEAD, foreign_names
from modicum.model import ModelConfig
from modicum.store import UserError

_OWN = ("GGUF.version", "GGUF.tensor_count", "GGUF.kv_count", "general.architecture")


def read_back(
    file: Path, name: str, config: ModelConfig, metadata: Mapping[str, Value], tensors: Iterable[FileTensor]
) -> tuple[int, int]:
    """How many keys and tensors the file has, when each is what it should be. Raises UserError, `name` in front,
    listing those that are not."""
    reader = gguf_library().GGUFReader(file)
    faults = [*_keys(reader, config, metadata), *_tensors(reader, config, tensors)]
    if faults:
        lines = [f"  {fault}" for fault in faults[:12]] + (
            [f"  and {len(faults) - 12} more"] if len(faults) > 12 else []
        )
        raise UserError("\n".join([f"{name}: read back, it is not the checkpoint, and was not written", *lines]))
    return len(reader.fields) - len(_OWN) + 1, len(reader.tensors)


def _keys(reader: Any, config: ModelConfig, metadata: Mapping[str, Value]) -> Iterator[str]:
    wanted = {"general.architecture": architecture_of(config), **metadata}
    found = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    for key, value in wanted.items():
        if not value and isinstance(value, str | list):
            continue  # the writer leaves out what is empty
        if key not in found:
            yield f"{key}: missing"
        elif not _same(found[key], value):
            yield f"{key}: the file says {_short(found[key], value)}, the checkpoint {_short(value, found[key])}"
    tokens = len(found.get("tokenizer.ggml.tokens", ()))
    if tokens != config.vocab_size:
        yield f"tokenizer.ggml.tokens: the file has {tokens}, the checkpoint's vocabulary {config.vocab_size}"
    yield from (f"{key}: left over" for key in found if key not in wanted)


def _same(found: Any, value: Value) -> bool:
    return bool(np.float32(found) == np.float32(value)) if isinstance(value, float) else bool(found == value)


def _short(value: Any, other: Any) -> str:
    """A value, or of a list how long it is and where it departs from the other."""
    if not isinstance(value, list) or not isinstance(other, list):
        return repr(value)[:80]
    place = next((i for i, (a, b) in enumerate(zip(value, other, strict=False)) if a != b), min(len(value), len(other)))
    return f"{len(value)} of which number {place} is {value[place : place + 1] or 'none'}"


def _tensors(reader: Any, config: ModelConfig, tensors: Iterable[FileTensor]) -> Iterator[str]:
    found = {tensor.name: tensor for tensor in reader.tensors}
    head = foreign_names("gguf", config).get
    digests: dict[bytes, str] = {}
    differing: list[FileTensor] = []
    wanted: set[str] = set()
    for tensor in tensors:
        wanted.add(tensor.name)
        digests.setdefault(sha256(tensor.data.tobytes()).digest(), tensor.name)
        if tensor.name not in found:
            lost = " (llama.cpp would take the embedding for it)" if head(tensor.name) == HEAD else ""
            yield f"{tensor.name}: missing{lost}"
            continue
        there = found[tensor.name]
        shape = tuple(int(size) for size in reversed(there.shape))
        if int(there.tensor_type) != TYPES[tensor.kind][0] or shape != tensor.shape:
            wrong = f"{there.tensor_type.name.lower()} {list(shape)}"
            yield f"{tensor.name}: is {wrong}, should be {tensor.kind} {list(tensor.shape)}"
        elif _bytes(there) != tensor.data.tobytes():
            differing.append(tensor)
    for tensor in differing:
        yield f"{tensor.name}: {_difference(tensor, _bytes(found[tensor.name]), digests, config)}"
    for name in found.keys() - wanted:
        tied = " (the head is tied: it is the embedding)" if name == "output.weight" else ""
        yield f"{name}: left over{tied}"


def _bytes(tensor: Any) -> bytes:
    return bytes(np.ascontiguousarray(tensor.data).view(np.uint8).tobytes())


def _difference(wanted: FileTensor, data: bytes, digests: Mapping[bytes, str], config: ModelConfig) -> str:
    other = digests.get(sha256(data).digest())
    if other is not None:
        return f"holds the numbers of {other}"
    if data == _other_layout(wanted, config):
        return f"its rows are not in the {LAYOUTS[architecture_of(config)]} rotary layout"
    found = np.frombuffer(data, np.uint8)
    _, block, size = TYPES[wanted.kind]
    places = np.flatnonzero(found != wanted.data.reshape(-1))
    first, blocks = int(places[0]), len(np.unique(places // size))
    if block > 1:
        part = "scale differs" if first % size < 2 else "numbers differ"
        return f"differs in {blocks} of {found.size // size} blocks; in block {first // size} the {part}"
    return f"differs in {blocks} of {found.size // size} numbers, first in number {first // size}"


def _other_layout(wanted: FileTensor, config: ModelConfig) -> bytes | None:
    """The bytes of a tensor whose rows were left in the half layout, where the file has another; else None."""
    target = LAYOUTS[architecture_of(config)]
    ours = foreign_names("gguf", config).get(wanted.name)
    if ours is None or target == "half":
        return None
    rows = torch.from_numpy(wanted.data.reshape(wanted.shape[0], -1))  # a row is whole bytes in every type
    moved = relaid({ours: rows}, head_dim=config.head_dim, source=target, target="half")[ours]
    return moved.numpy().tobytes()
