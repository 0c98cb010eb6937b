"""The loader of conversations: the same handle on a run's batches as data's Loader, so that one loop takes both.

Row k of the run is row k mod R of epoch k div R, where R rows hold every conversation once; so the whole state is how
many rows were handed out.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil
from typing import Self

from modicum.data import Batch, Prefetcher
from modicum.store import UserError, hash_json
from modicum.tune.examples import Examples
from modicum.tune.packing import EpochPlan, Packing
from modicum.tune.rows import packed_batch


@dataclass
class _RankBatches:
    """The batches of one rank from any row on. No part of the loader, so that the thread does not keep that alive."""

    examples: Examples
    packing: Packing
    sequence_length: int
    pad_id: int
    separate_documents: bool
    seed: int
    batch_size: int
    rank: int
    world_size: int
    _plan: tuple[int, EpochPlan] | None = field(default=None, init=False)

    def batches(self, rows: int) -> Iterator[Batch]:
        """From the run's row `rows` on; within an update, first what each rank has left of its share."""
        share = self.batch_size // self.world_size
        while True:
            update, handed = divmod(rows, self.batch_size)
            left = range(handed // self.world_size, share)
            first = update * self.batch_size + self.rank * share
            yield packed_batch(
                self.examples,
                [self.row(first + place) for place in left],
                sequence_length=self.sequence_length,
                pad_id=self.pad_id,
                separate_documents=self.separate_documents,
            )
            rows = (update + 1) * self.batch_size

    def row(self, number: int) -> list[int]:
        """The examples in the run's row `number`. Holds one epoch's plan at a time."""
        epoch, place = divmod(number, self.packing.rows)
        if self._plan is None or self._plan[0] != epoch:
            self._plan = (epoch, self.packing.epoch(self.seed, epoch))
        return self._plan[1].row(place)


class ConversationLoader:
    """Iterates without end over the Batches of the run, one an optimizer update, `batch_size` rows over all ranks.

    Every conversation stands whole in exactly one row of an epoch, rows are at most sequence_length + 1 tokens, and
    each epoch has another order, a function of (seed, epoch) alone. `rows_per_epoch` and `padding_share` (the share of
    places that hold no token) are the same for every epoch. `prefetch` batches are made ahead on a background thread.
    Raises UserError when there is no example, and for a batch_size that the ranks cannot share.
    """

    rows_available: int | None = None  # nothing bounds how often conversations may be seen

    def __init__(
        self,
        examples: Examples,
        *,
        sequence_length: int,
        batch_size: int,
        seed: int,
        pad_id: int,
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
        if not len(examples):
            raise UserError("no conversation to train on; see the report of the conversations for what was left out")
        self.batch_size = batch_size
        self.world_size = world_size
        packing = Packing(examples.lengths, sequence_length + 1)
        self.rows_per_epoch = packing.rows
        self.padding_share = packing.padding_share
        self._order = _RankBatches(
            examples, packing, sequence_length, pad_id, separate_documents, seed, batch_size, rank, world_size
        )
        self._prefetch = prefetch
        self._prefetcher: Prefetcher[Batch] | None = None
        self._waited = 0.0
        self._rows = 0
        self._newest = 0
        identity = [examples.hash, sequence_length, seed, separate_documents]
        self._data = int(hash_json(identity)[:15], 16)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._prefetcher is None:
            self._prefetcher = Prefetcher(self._order.batches(self._rows), self._prefetch)
        batch = self._prefetcher.get()
        self._rows = (self._rows // self.batch_size + 1) * self.batch_size
        self._newest = batch.rows
        return batch

    def check(self, rows: int) -> None:
        """Nothing to refuse: conversations may be seen any number of times. Here because every loader has it."""

    def epochs(self, rows: int) -> dict[str, float]:
        """How often a run of `rows` rows sees each conversation."""
        return {"conversations": rows / self.rows_per_epoch}

    def rows_for(self, epochs: float) -> int:
        """How many rows `epochs` passes over the conversations take, rounded up."""
        return ceil(Fraction(str(epochs)) * self.rows_per_epoch)

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

        Raises UserError when the state is of other conversations or another order, or stands within an update and the
        number of ranks or the batch size has changed.
        """
        if state["data"] != self._data:
            raise UserError(
                "the loader's state belongs to other conversations, another tokenizer, seed, sequence length or "
                "document separation: go on with those, or start a new run"
            )
        before, now = (state["world_size"], state["batch_size"]), (self.world_size, self.batch_size)
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
