"""The stateful loader: batches of a run in their one order, for any number of ranks, from any row on.

Its whole state is how many rows the run has handed out. Which window a row holds is the mixture's affair.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Self

from modicum.data.batch import Batch, window_batch
from modicum.data.mixture import Mixture
from modicum.data.prefetch import Prefetcher
from modicum.data.shards import Shards
from modicum.store import UserError, hash_json


@dataclass(frozen=True)
class _RankBatches:
    """The batches of one rank from any row on. No part of the Loader, so that the thread does not keep that alive."""

    shards: Shards
    mixture: Mixture
    sequence_length: int
    separate_documents: bool
    batch_size: int
    rank: int
    world_size: int

    def batches(self, rows: int) -> Iterator[Batch]:
        """From the run's row `rows` on; within an update, first what each rank has left of its share."""
        share = self.batch_size // self.world_size
        update, handed = divmod(rows, self.batch_size)
        handed //= self.world_size
        while True:
            first = update * self.batch_size + self.rank * share + handed
            yield window_batch(
                self.shards,
                self.mixture.rows(first, share - handed),
                sequence_length=self.sequence_length,
                separate_documents=self.separate_documents,
            )
            update, handed = update + 1, 0


class Loader:
    """Iterates over the Batches of the run, one an optimizer update.

    Update u is made of the run's rows u·batch_size .. (u+1)·batch_size-1; rank r of W hands out the r-th W-th of them,
    so the run's order does not depend on W. `weights` says how often a pass sees each window of a source (default 1),
    `max_epochs` how often the run may (default: no bound). `prefetch` batches are made ahead on a background thread.
    Raises UserError for a source without tokens, for a batch_size that the ranks cannot share, and from __next__ when
    max_epochs are used up.
    """

    def __init__(
        self,
        shards: Shards,
        *,
        sequence_length: int,
        batch_size: int,
        seed: int,
        weights: Mapping[str, float] | None = None,
        max_epochs: Mapping[str, float] | None = None,
        separate_documents: bool = True,
        rank: int = 0,
        world_size: int = 1,
        prefetch: int = 2,
    ) -> None:
        if sequence_length < 1 or batch_size < 1 or not 0 <= rank < world_size or prefetch < 1:
            raise ValueError(
                f"sequence_length {sequence_length}, batch_size {batch_size}, rank {rank} of {world_size} or "
                f"prefetch {prefetch} is out of range"
            )
        if batch_size % world_size:
            raise UserError(
                f"batch_size {batch_size} cannot be shared by {world_size} ranks: make it a multiple of them"
            )
        self.batch_size = batch_size
        self.world_size = world_size
        self.mixture = Mixture(shards.windows(sequence_length), seed=seed, weights=weights, max_epochs=max_epochs)
        self._order = _RankBatches(
            shards, self.mixture, sequence_length, separate_documents, batch_size, rank, world_size
        )
        self._prefetch = prefetch
        self._prefetcher: Prefetcher[Batch] | None = None
        self._waited = 0.0
        self._rows = 0
        self._newest = 0
        identity = [shards.fingerprint, sequence_length, seed, separate_documents, self.mixture.weights]
        self._data = int(hash_json(identity)[:15], 16)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        end = (self._rows // self.batch_size + 1) * self.batch_size
        self.check(end)
        if self._prefetcher is None:
            self._prefetcher = Prefetcher(self._order.batches(self._rows), self._prefetch)
        batch = self._prefetcher.get()
        self._rows = end
        self._newest = batch.rows
        return batch

    def check(self, rows: int) -> None:
        """Raise UserError when a run of `rows` rows sees a source more often than its max_epochs; ask before a run."""
        self.mixture.check(rows, batch_size=self.batch_size)

    def epochs(self, rows: int) -> dict[str, float]:
        """How often a run of `rows` rows sees each source."""
        return self.mixture.epochs(rows)

    @property
    def rows_available(self) -> int | None:
        """The longest run that max_epochs allows, in rows; None when nothing bounds it."""
        return self.mixture.rows_available

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
        rows = self._rows - unused_rows * self.world_size
        return {"rows": rows, "batch_size": self.batch_size, "world_size": self.world_size, "data": self._data}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from a state. The next batch is the rest of the update that the state stood in.

        Raises UserError when the state is of other data or another order, or stands within an update and the number of
        ranks or the batch size has changed (between updates they may: rows follow in the same order).
        """
        if state["data"] != self._data:
            raise UserError(
                "the loader's state belongs to other shards, another seed, sequence length, mixture or document "
                "separation: go on with those, or start a new run"
            )
        before, now = (state["world_size"], state["batch_size"]), (self.world_size, self.batch_size)
        # within an update of several ranks the rows handed out are no beginning of the run, but a piece of each share
        between = all(ranks == 1 or state["rows"] % batch_size == 0 for ranks, batch_size in (before, now))
        if before != now and not between:
            raise UserError(
                f"the loader's state stands within an update of {before[1]} sequences on {before[0]} ranks, and this "
                f"run has {now[1]} on {now[0]}: go on with the former, or from a checkpoint between updates"
            )
        self.close()
        self._rows = state["rows"]
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
