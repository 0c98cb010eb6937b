"""What every stage is given: the recipe, the run's folder, the hashes of its inputs, and someone who listens."""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from modicum.recipe import Recipe
from modicum.store import Fingerprints, RunDirectory
from modicum.train import ALONE, Ranks


class Listener(Protocol):
    """Who is told how the work goes on. The command line draws bars; a program may keep silent."""

    def say(self, text: str) -> None:
        """One line that stays."""

    def progress(self, done: int, total: int, text: str) -> None:
        """The work in hand stands at `done` of `total` (0: nobody knows); called often, draws over itself."""


class Silent:
    """A listener that does nothing."""

    def say(self, text: str) -> None:
        """Nothing."""

    def progress(self, done: int, total: int, text: str) -> None:
        """Nothing."""


@dataclass
class Road:
    """One run of one recipe, by one process or by many ranks, the first of which does all but the training alone."""

    recipe: Recipe
    listener: Listener = field(default_factory=Silent)
    ranks: Ranks = ALONE

    def __post_init__(self) -> None:
        self.run = RunDirectory(self.recipe.run_folder)
        self.fingerprints = Fingerprints(self.run.path / "fingerprints.json")

    def seed(self, stage: str) -> int:
        """The stage's own 32-bit seed, derived from the recipe's: stages must not draw the same numbers."""
        digest = hashlib.sha256(f"{self.recipe.seed}/{stage}".encode("ascii")).digest()
        return int.from_bytes(digest[:4], "big")

    def folder(self, stage: str) -> Path:
        return self.run.stage(stage).path
