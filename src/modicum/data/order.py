"""A seeded order of n things that takes no memory: any place of it can be asked for alone.

A Feistel network over a rectangle of at least n cells, walked on until it lands below n (Black and Rogaway 2002,
"Ciphers with Arbitrary Finite Domains"), with SplitMix64 (Steele, Lea and Flood 2014) as its round function: integer
arithmetic only, so the order is the same on every machine and in every version of NumPy.
"""

import hashlib
import json

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 8  # 4 suffice for large n; a rectangle of a few cells needs more before all its orders are equally likely


def order_key(*parts: str | int) -> int:
    """64 bits that depend on every part: what an order is seeded with (seed, source name, epoch)."""
    text = json.dumps(parts, ensure_ascii=True)
    return int.from_bytes(hashlib.sha256(text.encode("ascii")).digest()[:8], "little")


class Permutation:
    """A bijection of 0..size-1 chosen by a 64-bit key; called with an int64 array of places, gives the things there."""

    def __init__(self, size: int, key: int) -> None:
        if size < 1:
            raise ValueError(f"an order needs at least one thing, not {size}")
        self.size = size
        self._sizes, self._keys = np.array([size], np.int64), np.array([key], np.uint64)

    def __call__(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The things at these places. Raises IndexError for a place outside 0..size-1."""
        if places.size and (places.min() < 0 or places.max() >= self.size):
            raise IndexError(f"place outside an order of {self.size}")
        return things_at(places, self._sizes, self._keys)


def things_at(places: NDArray[np.int64], sizes: NDArray[np.int64], keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """What stands at place i of the order of sizes[i] things that keys[i] chooses; sizes and keys may have length 1."""
    columns = np.ceil(np.sqrt(sizes)).astype(np.uint64)
    things = sizes.astype(np.uint64)
    cells = _shuffled(places.astype(np.uint64), columns, things, _round_keys(keys))
    return cells.astype(np.int64)


def _shuffled(
    cells: NDArray[np.uint64], columns: NDArray[np.uint64], things: NDArray[np.uint64], keys: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """The cells moved by the network, and those that land outside of the things once more."""
    rows = (things + columns - np.uint64(1)) // columns
    row, column = cells // columns, cells % columns
    for first, second in zip(keys[::2], keys[1::2], strict=True):
        row = (row + _splitmix64(column ^ first) % rows) % rows
        column = (column + _splitmix64(row ^ second) % columns) % columns
    cells = row * columns + column
    outside = cells >= things
    if outside.any():
        columns, things, keys = (a if a.shape[-1] == 1 else a[..., outside] for a in (columns, things, keys))
        cells[outside] = _shuffled(cells[outside], columns, things, keys)
    return cells


def _round_keys(keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The first outputs of SplitMix64 from each key, one row a half round."""
    counters = np.arange(1, 2 * _ROUNDS + 1, dtype=np.uint64)[:, None]
    return _splitmix64(counters * np.uint64(0x9E3779B97F4A7C15) + keys)


def _splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The output mix of SplitMix64, modulo 2^64 (arrays of unsigned integers wrap around)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
