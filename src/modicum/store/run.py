"""runs/<name>/: where each stage of a run lies."""

from pathlib import Path

from modicum.store.stage import Stage


class RunDirectory:
    """The folder of one run; layout as in ARCHITECTURE.md."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def recipe(self) -> Path:
        """The resolved recipe, every default written out."""
        return self.path / "recipe.yaml"

    def stage(self, name: str) -> Stage:
        """The folder of one stage (corpus, tokenizer, shards, pretrain, sft, evaluate, report)."""
        return Stage(self.path / name)

    def checkpoints(self, stage: str) -> Path:
        """The folder of a training stage's checkpoints, with its `last` and `best` links."""
        return self.path / stage / "checkpoints"
