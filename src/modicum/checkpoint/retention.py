"""Which checkpoints stay: the newest few, every n-th, and always the best and the last."""

import shutil
from pathlib import Path

from modicum.checkpoint.save import point


def mark_best(root: Path, path: Path) -> None:
    """Make `root/best` a link to this checkpoint. The caller knows that its score is the best so far."""
    point(root / "best", path)


def best_of(root: Path) -> Path | None:
    """The checkpoint that `best` points to, or None."""
    link = root / "best"
    return link.resolve() if link.exists() else None


def prune(root: Path, *, keep_last: int, keep_every_steps: int | None) -> list[Path]:
    """Delete what no rule keeps; returns the deleted folders.

    Kept: the `keep_last` newest, those whose step is a multiple of `keep_every_steps`, and what `best` and `last` point
    to.
    """
    folders = sorted(folder for folder in root.glob("step-*") if folder.name[5:].isdecimal())
    kept = set(folders[-keep_last:])
    kept |= {root / (root / link).resolve().name for link in ("best", "last") if (root / link).exists()}
    if keep_every_steps is not None:
        kept |= {folder for folder in folders if int(folder.name[5:]) % keep_every_steps == 0}
    doomed = [folder for folder in folders if folder not in kept]
    for folder in doomed:
        # a folder that is half deleted must not look like a checkpoint
        gone = folder.with_name(f".tmp-{folder.name}")
        folder.rename(gone)
        shutil.rmtree(gone)
    return doomed
