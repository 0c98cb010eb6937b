"""The rows of a fine-tuning run: row k is row k mod R of epoch k div R, where R rows hold every conversation once."""

from fractions import Fraction
from math import ceil

from modicum.data import Batch
from modicum.store import UserError, hash_json
from modicum.tune.examples import Examples
from modicum.tune.packing import EpochPlan, Packing
from modicum.tune.rows import packed_batch


class ConversationRows:
    """Every conversation stands whole in exactly one row of an epoch, rows are at most sequence_length + 1 tokens, and
    each epoch has another order, a function of (seed, epoch) alone. There is no end to them.

    `rows_per_epoch` and `padding_share` (the share of places that hold no token) are the same for every epoch.
    Raises UserError when there is no example.
    """

    made_of = "other conversations, another tokenizer, seed, sequence length or document separation"
    rows_available: int | None = None  # nothing bounds how often conversations may be seen

    def __init__(
        self, examples: Examples, *, sequence_length: int, seed: int, pad_id: int, separate_documents: bool = True
    ) -> None:
        if sequence_length < 1:
            raise ValueError(f"sequence_length {sequence_length} is out of range")
        if not len(examples):
            raise UserError("no conversation to train on; see the report of the conversations for what was left out")
        self._examples = examples
        self._packing = Packing(examples.lengths, sequence_length + 1)
        self._sequence_length = sequence_length
        self._seed = seed
        self._pad_id = pad_id
        self._separate_documents = separate_documents
        self._plan: tuple[int, EpochPlan] | None = None
        self.rows_per_epoch = self._packing.rows
        self.padding_share = self._packing.padding_share
        self.fingerprint = int(hash_json([examples.hash, sequence_length, seed, separate_documents])[:15], 16)

    def batch(self, first: int, count: int) -> Batch:
        """The rows first..first+count-1 of the run."""
        return packed_batch(
            self._examples,
            [self._row(first + place) for place in range(count)],
            sequence_length=self._sequence_length,
            pad_id=self._pad_id,
            separate_documents=self._separate_documents,
        )

    def check(self, rows: int, *, batch_size: int) -> None:
        """Nothing to refuse: conversations may be seen any number of times."""

    def epochs(self, rows: int) -> dict[str, float]:
        """How often a run of `rows` rows sees each conversation."""
        return {"conversations": rows / self.rows_per_epoch}

    def rows_for(self, epochs: float) -> int:
        """How many rows `epochs` passes over the conversations take, rounded up."""
        return ceil(Fraction(str(epochs)) * self.rows_per_epoch)

    def _row(self, number: int) -> list[int]:
        """The examples in the run's row `number`. Holds one epoch's plan at a time."""
        epoch, place = divmod(number, self._packing.rows)
        if self._plan is None or self._plan[0] != epoch:
            self._plan = (epoch, self._packing.epoch(self._seed, epoch))
        return self._plan[1].row(place)
