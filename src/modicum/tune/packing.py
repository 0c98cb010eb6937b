"""Whole conversations into rows of equal capacity: best fit, longest first.

The shape of the result (how many rows, which lengths share one) depends on the lengths alone; which of several
equally long conversations takes a place, and the order of rows, change with every epoch. So every epoch has the same
number of rows, and the k-th row of a run is found without packing the epochs before it.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from modicum.data import Permutation, order_key

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class EpochPlan:
    """One epoch: row r holds the conversations `members[starts[r]:starts[r + 1]]`, in that order."""

    members: Ints
    starts: Ints

    def row(self, number: int) -> list[int]:
        return [int(member) for member in self.members[self.starts[number] : self.starts[number + 1]]]


class Packing:
    """How conversations of `lengths` tokens share rows of `capacity` tokens, each whole and in exactly one row.

    Memory: three integers a conversation. Raises ValueError when a length is 0 or above the capacity.
    """

    def __init__(self, lengths: npt.ArrayLike, capacity: int) -> None:
        self.lengths: Ints = np.asarray(lengths, dtype=np.int64)
        self.capacity = capacity
        if self.lengths.size and not 0 < self.lengths.min() <= self.lengths.max() <= capacity:
            raise ValueError(f"lengths must be 1 to {capacity}, found {self.lengths.min()} to {self.lengths.max()}")
        self._row_of_rank = best_fit(np.sort(self.lengths)[::-1], capacity)
        self.rows = int(self._row_of_rank.max(initial=-1)) + 1

    @property
    def padding_share(self) -> float:
        """The share of all places in an epoch's rows that hold no token."""
        return 1 - int(self.lengths.sum()) / (self.rows * self.capacity) if self.rows else 0.0

    def epoch(self, seed: int, epoch: int) -> EpochPlan:
        """The plan of an epoch, a pure function of (seed, epoch) and the lengths."""
        shuffled = _shuffled(len(self.lengths), seed, "conversations", epoch)
        by_rank = shuffled[np.argsort(-self.lengths[shuffled], kind="stable")]
        row_of = np.empty_like(self._row_of_rank)
        row_of[by_rank] = _shuffled(self.rows, seed, "rows", epoch)[self._row_of_rank]
        members = shuffled[np.argsort(row_of[shuffled], kind="stable")]
        starts = np.zeros(self.rows + 1, dtype=np.int64)
        np.cumsum(np.bincount(row_of, minlength=self.rows), out=starts[1:])
        return EpochPlan(members, starts)


def best_fit(lengths: npt.ArrayLike, capacity: int) -> Ints:
    """The row of each length, taken in order: the fullest row that still has room, else a new one.

    For falling lengths: at most 11/9 of the fewest rows possible, plus 4 (Johnson et al. 1974, "Worst-case performance
    bounds for simple one-dimensional packing algorithms"). A bit set of the free spaces makes each step a few machine
    words, whatever the number of rows.
    """
    rows: list[int] = []
    with_space: dict[int, list[int]] = {}
    spaces, opened = 0, 0
    for length in np.asarray(lengths, dtype=np.int64).tolist():
        fitting = spaces >> length
        if fitting:
            space = length + (fitting & -fitting).bit_length() - 1
            row = with_space[space].pop()
            if not with_space[space]:
                spaces &= ~(1 << space)
        else:
            space, row, opened = capacity, opened, opened + 1
        rows.append(row)
        if space > length:
            with_space.setdefault(space - length, []).append(row)
            spaces |= 1 << (space - length)
    return np.array(rows, dtype=np.int64)


def _shuffled(size: int, seed: int, what: str, epoch: int) -> Ints:
    """0..size-1 in an order of its own for each (seed, what, epoch), the same on every machine."""
    return Permutation(size, order_key(seed, what, epoch))(np.arange(size)) if size else np.arange(0)
