"""The rows of a pretraining run: windows of the shards, in the mixture's order."""

from collections.abc import Mapping

from modicum.data.batch import Batch, window_batch
from modicum.data.mixture import Mixture
from modicum.data.shards import Shards
from modicum.store import hash_json


class WindowRows:
    """Row k is the k-th window of the mixture. `weights` says how often a pass sees each window of a source (default
    1), `max_epochs` how often the run may (default: no bound).

    Raises UserError for a source without tokens.
    """

    made_of = "other shards, another seed, sequence length, mixture or document separation"

    def __init__(
        self,
        shards: Shards,
        *,
        sequence_length: int,
        seed: int,
        weights: Mapping[str, float] | None = None,
        max_epochs: Mapping[str, float] | None = None,
        separate_documents: bool = True,
    ) -> None:
        if sequence_length < 1:
            raise ValueError(f"sequence_length {sequence_length} is out of range")
        self.mixture = Mixture(shards.windows(sequence_length), seed=seed, weights=weights, max_epochs=max_epochs)
        self._shards = shards
        self._sequence_length = sequence_length
        self._separate_documents = separate_documents
        identity = [shards.fingerprint, sequence_length, seed, separate_documents, self.mixture.weights]
        self.fingerprint = int(hash_json(identity)[:15], 16)

    @property
    def rows_available(self) -> int | None:
        """The longest run that max_epochs allows, in rows; None when nothing bounds it."""
        return self.mixture.rows_available

    def batch(self, first: int, count: int) -> Batch:
        """The rows first..first+count-1 of the run."""
        return window_batch(
            self._shards,
            self.mixture.rows(first, count),
            sequence_length=self._sequence_length,
            separate_documents=self._separate_documents,
        )

    def check(self, rows: int, *, batch_size: int) -> None:
        """Raise UserError when a run of `rows` rows sees a source more often than its max_epochs."""
        self.mixture.check(rows, batch_size=batch_size)

    def epochs(self, rows: int) -> dict[str, float]:
        """How often a run of `rows` rows sees each source."""
        return self.mixture.epochs(rows)
