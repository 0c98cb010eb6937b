"""What a training run is told and what it tells: the handle on its batches, its intervals, its result."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from modicum.data import Batch

Progress = Callable[[int, int, str], None]
Say = Callable[[str], None]
Heldout = Callable[[], Iterable[Batch]]


class Batches(Protocol):
    """A run's batches, one an update, and where they stand; data's and tune's loaders are such."""

    batch_size: int

    def __next__(self) -> Batch: ...

    def check(self, rows: int) -> None: ...

    def epochs(self, rows: int) -> dict[str, float]: ...

    @property
    def wait_seconds(self) -> float: ...

    def state_dict(self) -> dict[str, int]: ...

    def load_state_dict(self, state: Mapping[str, int]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Intervals:
    """In updates. Retention: the `keep_last` newest checkpoints, every keep_every-th step, and always the best."""

    log: int = 10
    evaluate: int = 100
    checkpoint: int = 100
    keep_last: int = 2
    keep_every: int | None = None


@dataclass(frozen=True)
class TrainResult:
    """best: the checkpoint with the lowest held-out loss (nats a target), None where none was measured."""

    last: Path
    best: Path | None
    best_heldout_loss: float | None
    steps: int
    tokens: int
    seconds: float


def due(step: int, every: int, last: int) -> bool:
    """Whether something that happens every so many updates happens after this one; after the last it always does."""
    return step % every == 0 or step == last


def silent(*_: object) -> None:
    """For whoever does not listen."""
