"""One file of weights as several with an index, in the form in which transformers writes and reads them."""

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from modicum.store import UserError, write_json

SHARD_BYTES = 5 * 10**9  # transformers' own
INDEX = "model.safetensors.index.json"
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def size_of(text: str) -> int:
    """Bytes that a size such as 5GB or 200MiB names. Raises UserError for what is none."""
    for unit, factor in _UNITS.items():
        number = text.upper().removesuffix(unit)
        if number != text.upper() and number.strip().isdecimal() and int(number):
            return int(number) * factor
    raise UserError(f"--max-shard-size {text!r}: expected a number and a unit, such as 5GB or 200MB")


def in_shards(file: Path, most: int) -> tuple[str, ...]:
    """Replace a safetensors file whose tensors have more than `most` bytes by shards that have no more, and an index.

    A tensor larger than that has a shard of its own. Returns the names of the files; that one where it is small enough.
    """
    with safe_open(file, framework="pt") as tensors:
        names = list(tensors.keys())
        sizes = {name: tensors.get_tensor(name).nbytes for name in names}
        groups = _groups(sizes, most)
        if len(groups) == 1:
            return (file.name,)
        weight_map: dict[str, str] = {}
        for number, group in enumerate(groups, 1):
            shard = f"{file.stem}-{number:05d}-of-{len(groups):05d}.safetensors"
            held = {name: tensors.get_tensor(name) for name in group}
            try:
                save_file(held, file.with_name(shard), {"format": "pt"})
            except SafetensorError as error:  # the Rust side wraps what the operating system said
                raise UserError(f"{shard} could not be written ({error}); make room on the disk") from None
            weight_map |= dict.fromkeys(group, shard)
    file.unlink()
    total = sum(sizes.values())
    write_json(file.with_name(INDEX), {"metadata": {"total_size": total}, "weight_map": weight_map})
    return tuple(dict.fromkeys(weight_map.values()))


def _groups(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    groups: list[list[str]] = [[]]
    held = 0
    for name, size in sizes.items():
        if groups[-1] and held + size > most:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += size
    return groups
