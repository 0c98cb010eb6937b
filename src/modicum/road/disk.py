"""Bytes of disk that a run takes, by part, with the retention of checkpoints that its recipe sets."""

from dataclasses import dataclass
from operator import mul

from modicum.model import ModelConfig
from modicum.recipe import Recipe, TrainSettings
from modicum.road.sizes import checkpoint_bytes

_PACKED = 0.35  # bytes of a .jsonl.zst in a byte of its text; the shipped corpus has 0.31


@dataclass(frozen=True)
class Disk:
    """Bytes at the run's fullest moment. `checkpoints` counts one more than is kept: the one being written."""

    corpus: int
    shards: int
    checkpoints: int

    @property
    def total(self) -> int:
        return self.corpus + self.shards + self.checkpoints


def disk_of(recipe: Recipe, config: ModelConfig, *, text_bytes: int, tokens: int, sft_steps: int) -> Disk:
    """What this recipe's run will hold; the corpus twice, since it is written once more while it is sorted out."""
    stages: list[tuple[TrainSettings, int]] = [(recipe.pretrain, recipe.pretrain.steps)]
    if recipe.sft is not None:
        stages.append((recipe.sft, sft_steps))
    sizes = [checkpoint_bytes(config, settings.optimizer) for settings, _ in stages]
    kept = [checkpoints_kept(settings, steps) for settings, steps in stages]
    return Disk(
        corpus=round(2 * _PACKED * text_bytes),
        shards=tokens * (2 if config.vocab_size <= 65_536 else 4),
        checkpoints=sum(map(mul, kept, sizes)) + max(sizes),
    )


def checkpoints_kept(settings: TrainSettings, steps: int) -> int:
    """How many checkpoints of a training stage stay: the newest, every n-th, and the best where it is none of those."""
    written = len(saved_steps(settings, steps))
    every = steps // settings.keep_every_steps if settings.keep_every_steps else 0
    return min(written, settings.keep_last + every + 1)


def saved_steps(settings: TrainSettings, steps: int) -> set[int]:
    """The updates after which a checkpoint is written: at its interval, at the end, and at a look at held-out text,
    where each may be the best so far."""
    looks, saves = settings.evaluate_every_steps, settings.checkpoint_every_steps
    return {*range(looks, steps, looks), *range(saves, steps, saves), steps}
