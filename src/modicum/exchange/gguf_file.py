"""A GGUF file from anywhere: its header checked against the file's size before anything is believed.

Every count, length and offset in it is a claim. Nothing is allocated for one that the file has no room for.
"""

import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
from numpy.typing import NDArray

from modicum.exchange.gguf_weights import K_QUANTS, TYPES, Quant
from modicum.exchange.names import shown
from modicum.store import UserError

T = TypeVar("T")
# Far beyond any model's: a header of a hundred thousands of merges has ten megabytes. What a file claims beyond these
# is refused unread, whatever room it has, for the values of a header are all held in memory.
_LARGEST_HEADER, _LONGEST_TEXT, _LONGEST_NAME, _MOST_ITEMS, _MOST_ENTRIES = 1 << 26, 1 << 24, 1 << 10, 1 << 22, 1 << 16
# GGUF's number of each kind of value: struct's letter for it. 8 is text, 9 a list.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _LIST = 8, 9
_KINDS: dict[int, Quant] = {number: kind for kind, (number, _, _) in TYPES.items() if kind not in K_QUANTS}
# Only to be refused by name.
_OTHER_KINDS = {3: "q4_1", 6: "q5_0", 7: "q5_1", 10: "q2_k", 11: "q3_k", 12: "q4_k", 13: "q5_k", 14: "q6_k", 28: "f64"}


@dataclass(frozen=True)
class Placed:
    """Where a tensor lies: its shape, rows first, its type, and its bytes from `start` of the file on."""

    shape: tuple[int, ...]
    kind: Quant
    start: int
    size: int


@dataclass(frozen=True)
class GgufFile:
    """What a file holds: its keys, float32 values as the shortest decimals, and its tensors, which lie in the file."""

    path: Path
    values: dict[str, Any]
    tensors: dict[str, Placed]

    def bytes_of(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a tensor, (rows, bytes of a row) or (bytes,), read now."""
        place = self.tensors[name]
        data = np.fromfile(self.path, np.uint8, count=place.size, offset=place.start)
        if data.size != place.size:
            raise UserError(f"{self.path}: became shorter while it was read")
        return data.reshape(*place.shape[:-1], -1)


def read_gguf(path: Path) -> GgufFile:
    """The header of a file. Raises UserError, naming the place, for one that is not whole and sound."""
    return GgufFile(path, *_read(path, _parts))


def read_keys(path: Path) -> dict[str, Any]:
    """The keys of a file alone, whose tensors may be of any type. Raises UserError as read_gguf does."""
    return _read(path, _keys)[0]


def _read(path: Path, parts: Callable[["_Reading"], T]) -> T:
    if not path.is_file():
        raise UserError(f"{path}: missing, or no regular file; expected a GGUF file")
    try:
        with path.open("rb") as file:
            reading = _Reading(path, file, path.stat().st_size)
            return parts(reading)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except EOFError:
        raise UserError(f"{path}: ends inside its header (at byte {reading.at:,}); copy it again") from None


class _Reading:
    """A place in the header that moves on; only what has passed is in memory."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path, self.file, self.size, self.at = path, file, size, 0
        self.items_left = _MOST_ITEMS

    def take(self, count: int) -> bytes:
        """The next ones. Raises EOFError where the file ends before, UserError where a header would not end."""
        if self.at + count > _LARGEST_HEADER:
            raise UserError(f"{self.path}: its header goes beyond {_LARGEST_HEADER >> 20} MiB; no model's does")
        found = self.file.read(count)
        if len(found) < count:
            raise EOFError
        self.at += count
        return found

    def number(self, letter: str) -> Any:
        (found,) = struct.unpack(f"<{letter}", self.take(struct.calcsize(f"<{letter}")))
        return found

    def count(self, what: str, least: int, most: int) -> int:
        """How many of something follow, when the file has room for them at `least` bytes each, and it is no absurd
        number."""
        found: int = self.number("Q")
        if found * least > self.size - self.at:
            raise UserError(
                f"{self.path}: claims {found:,} {what}, more than it has room for; it is cut off or damaged"
            )
        if found > most:
            raise UserError(f"{self.path}: claims {found:,} {what}; more than {most:,} are not read")
        return found

    def text(self, what: str, most: int = _LONGEST_TEXT) -> str:
        length = self.count(f"bytes of {what}", 1, most)
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError:
            raise UserError(f"{self.path}: {what} before byte {self.at:,} is not UTF-8; it is damaged") from None

    def value(self, kind: int, key: str) -> Any:
        if kind == _TEXT:
            return self.text(key)
        if kind not in _SCALARS:
            raise UserError(f"{self.path}: {key} is of kind {kind}, which GGUF does not have; it is damaged")
        return _decimal(self.number(_SCALARS[kind])) if kind == 6 else self.number(_SCALARS[kind])

    def items(self, key: str) -> list[Any]:
        kind = self.number("I")
        if kind == _TEXT:
            return [self.text(key) for _ in range(self._items(key, 8))]
        if kind not in _SCALARS:
            raise UserError(f"{self.path}: {key} is a list of kind {kind}, which is not read")
        width = struct.calcsize(f"<{_SCALARS[kind]}")
        count = self._items(key, width)
        found = list(struct.unpack(f"<{count}{_SCALARS[kind]}", self.take(count * width)))
        return [_decimal(item) for item in found] if kind == 6 else found

    def _items(self, key: str, least: int) -> int:
        count = self.count(f"items of {key}", least, self.items_left)
        self.items_left -= count
        return count


def _decimal(number: float) -> float:
    """The shortest decimal that is this float32: 1e-05, not 9.99999974737875e-06."""
    return float(str(np.float32(number)))


def _keys(reading: _Reading) -> tuple[dict[str, Any], int]:
    """The keys, and how many tensors follow."""
    path = reading.path
    begins = reading.take(min(4, reading.size))
    if begins != b"GGUF":
        raise UserError(f"{path}: not a GGUF file (it begins with {begins!r})")
    version = reading.number("I")
    if version not in (2, 3):
        swapped = " (its bytes are in the other order)" if version in (2 << 24, 3 << 24) else ""
        raise UserError(f"{path}: GGUF version {version}{swapped}; versions 2 and 3 are read")
    tensors = reading.count("tensors", 32, _MOST_ENTRIES)
    keys = reading.count("keys", 13, _MOST_ENTRIES)
    values: dict[str, Any] = {}
    for _ in range(keys):
        key = reading.text("a key", _LONGEST_NAME)
        if key in values:
            raise UserError(f"{path}: has the key {shown(key)} twice")
        kind = reading.number("I")
        values[key] = reading.items(shown(key)) if kind == _LIST else reading.value(kind, shown(key))
    return values, tensors


def _parts(reading: _Reading) -> tuple[dict[str, Any], dict[str, Placed]]:
    path = reading.path
    values, tensors = _keys(reading)
    claims = [_claim(reading) for _ in range(tensors)]
    step = values.get("general.alignment", 32)
    if type(step) is not int or not 0 < step <= 1 << 16 or step & (step - 1):
        raise UserError(f"{path}: general.alignment {step!r}; expected a power of two")
    start = -(-reading.at // step) * step
    return values, _placed(path, reading.size, start, step, claims)


def _claim(reading: _Reading) -> tuple[str, tuple[int, ...], int, int]:
    """A tensor's name, shape, kind and offset as the file says them."""
    name = reading.text("a tensor's name", _LONGEST_NAME)
    dimensions = reading.number("I")
    if not 1 <= dimensions <= 4:
        raise UserError(f"{reading.path}: {shown(name)} has {dimensions:,} dimensions; a tensor has one to four")
    shape = tuple(reversed([reading.number("Q") for _ in range(dimensions)]))
    return name, shape, reading.number("I"), reading.number("Q")


def _placed(
    path: Path, size: int, start: int, step: int, claims: list[tuple[str, tuple[int, ...], int, int]]
) -> dict[str, Placed]:
    """The tensors, when each has a type that is read and lies inside the file, and no two share bytes."""
    found: dict[str, Placed] = {}
    faults = []
    for name, shape, number, offset in claims:
        if number not in _KINDS:
            kinds = ", ".join(_KINDS.values())
            faults.append(f"{shown(name)}: of type {_OTHER_KINDS.get(number, number)}; those that are read: {kinds}")
            continue
        kind = _KINDS[number]
        _, block, width = TYPES[kind]
        if name in found:
            faults.append(f"{shown(name)}: stands in it twice")
        elif min(shape) < 1 or shape[-1] % block:
            faults.append(f"{shown(name)}: {kind} has no shape {list(shape)}")
        elif offset % step or start + offset + math.prod(shape) // block * width > size:
            faults.append(f"{shown(name)}: {list(shape)} {kind} at {offset:,} do not lie in {size:,} bytes")
        else:
            found[name] = Placed(shape, kind, start + offset, math.prod(shape) // block * width)
    faults += list(_shared(found))
    if faults:
        lines = [f"  {fault}" for fault in faults[:12]] + (
            [f"  and {len(faults) - 12} more"] if len(faults) > 12 else []
        )
        raise UserError("\n".join([f"{path}: its tensors cannot be read", *lines]))
    return found


def _shared(found: dict[str, Placed]) -> Iterator[str]:
    ordered = sorted(found.items(), key=lambda item: item[1].start)
    for (name, place), (after, other) in pairwise(ordered):
        if place.start + place.size > other.start:
            yield f"{shown(after)}: shares bytes with {shown(name)}"
