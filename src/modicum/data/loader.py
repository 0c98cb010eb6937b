"""The stateful loader: batches of a run in their one order, for any number of ranks, from any row on.

Its whole state is how many rows the run has handed out. What a row holds is the affair of its `Rows`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, Self

from modicum.data.batch import Batch
from modicum.data.prefetch import Prefetcher
from modicum.store import UserError


class Rows(Protocol):
    """The rows of a run: row k is a function of k alone.

    fingerprint: a number that tells these rows in this order from others. made_of: what the order depends on, in the
    words of an error message. rows_available: the longest run in rows, None when nothing bounds it.
    """

    fingerprint: int
    made_of: str

    @property
    def rows_available(self) -> int | None: ...

    def batch(self, first: int, count: int) -> Batch:
        """The rows first..first+count-1 of the run."""

    def check(self, rows: int, *, batch_size: int) -> None:
        """Raises UserError when a run may not have so many rows."""

    def epochs(self, rows: int) -> dict[str, float]:
        """How often the first `rows` rows see each source."""


@dataclass(frozen=True)
class _RankBatches:
    """The batches of one rank from any row on. No part of the Loader, so that the thread does not keep that alive."""

    rows: Rows
    batch_size: int
    rank: int
    world_size: int

    def batches(self, start: int) -> Iterator[Batch]:
        """From the run's row `start` on; within an update, first what each rank has left of its share."""
        share = self.batch_size // self.world_size
        update, handed = divmod(start, self.batch_size)
        handed //= self.world_size
        while True:
            yield self.rows.batch(update * self.batch_size + self.rank * share + handed, share - handed)
            update, handed = update + 1, 0


class Loader:
    """Iterates over the Batches of the run, one an optimizer update.

    Update u is made of the run's rows u·batch_size .. (u+1)·batch_size-1; rank r of W hands out the r-th W-th of them,
    so the run's order does not depend on W. `prefetch` batches are made ahead on a background thread. Raises UserError
    for a batch_size that the ranks cannot share, and from __next__ when the rows are used up.
    """

    def __init__(self, rows: Rows, *, batch_size: int, rank: int = 0, world_size: int = 1, prefetch: int = 2) -> None:
        if batch_size < 1 or not 0 <= rank < world_size or prefetch < 1:
            raise ValueError(
                f"batch_size {batch_size}, rank {rank} of {world_size} or prefetch {prefetch} is out of range"
            )
        if batch_size % world_size:
            raise UserError(
                f"batch_size {batch_size} cannot be shared by {world_size} ranks: make it a multiple of them"
            )
        self.rows = rows
        self.batch_size = batch_size
        self.world_size = world_size
        self._order = _RankBatches(rows, batch_size, rank, world_size)
        self._prefetch = prefetch
        self._prefetcher: Prefetcher[Batch] | None = None
        self._waited = 0.0
        self._handed = 0
        self._newest = 0

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        end = (self._handed // self.batch_size + 1) * self.batch_size
        self.check(end)
        if self._prefetcher is None:
            self._prefetcher = Prefetcher(self._order.batches(self._handed), self._prefetch)
        batch = self._prefetcher.get()
        self._handed = end
        self._newest = batch.rows
        return batch

    def check(self, rows: int) -> None:
        """Raise UserError when a run of `rows` rows is longer than the rows allow; ask before a run."""
        self.rows.check(rows, batch_size=self.batch_size)

    def epochs(self, rows: int) -> dict[str, float]:
        """How often a run of `rows` rows sees each source."""
        return self.rows.epochs(rows)

    @property
    def rows_available(self) -> int | None:
        """The longest run that the rows allow; None when nothing bounds it."""
        return self.rows.rows_available

    @property
    def wait_seconds(self) -> float:
        """How long the consumer has waited for batches in all."""
        return self._waited + (self._prefetcher.wait_seconds if self._prefetcher else 0.0)

    def state_dict(self, unused_rows: int = 0) -> dict[str, int]:
        """Where the run stands: `rows` handed out over all ranks, and what they were handed out from and to.

        Batches made ahead do not count. `unused_rows` of this rank's newest batch are handed out again after a restore:
        what is left of it when the state is taken in the midst of an accumulation.
        """
        if not 0 <= unused_rows <= self._newest:
            raise ValueError(f"the newest batch has {self._newest} rows, of which {unused_rows} cannot be unused")
        return {
            "rows": self._handed - unused_rows * self.world_size,
            "batch_size": self.batch_size,
            "world_size": self.world_size,
            "data": self.rows.fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from a state. The next batch is the rest of the update that the state stood in.

        Raises UserError when the state is of other data or another order, or stands within an update and the number of
        ranks or the batch size has changed (between updates they may: rows follow in the same order).
        """
        if state["data"] != self.rows.fingerprint:
            raise UserError(f"the loader's state belongs to {self.rows.made_of}: go on with those, or start a new run")
        before, now = (state["world_size"], state["batch_size"]), (self.world_size, self.batch_size)
        # within an update of several ranks the rows handed out are no beginning of the run, but a piece of each share
        between = all(ranks == 1 or state["rows"] % batch_size == 0 for ranks, batch_size in (before, now))
        if before != now and not between:
            raise UserError(
                f"the loader's state stands within an update of {before[1]} sequences on {before[0]} ranks, and this "
                f"run has {now[1]} on {now[0]}: go on with the former, or from a checkpoint between updates"
            )
        self.close()
        self._handed = state["rows"]
        self._newest = 0

    def close(self) -> None:
        """End the background thread; iterating starts it anew."""
        if self._prefetcher is not None:
            self._waited += self._prefetcher.wait_seconds
            self._prefetcher.close()
            self._prefetcher = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
