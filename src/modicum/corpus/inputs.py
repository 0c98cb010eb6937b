"""Which files a source consists of, in an order that no file system decides, and which part reads which of them."""

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from modicum.corpus.files import plain_suffix
from modicum.recipe import SourceSettings
from modicum.store import UserError

SUFFIXES = (".jsonl", ".md", ".parquet", ".txt")


@dataclass(frozen=True)
class SourceFiles:
    """`names` are relative to `root`, sorted; a Hub data set has none. `skipped`: reason to files left out."""

    source: SourceSettings
    root: Path | None
    names: list[str]
    sizes: list[int]
    skipped: dict[str, int]

    @property
    def passed_over(self) -> str:
        """How many files were left out and why, in words; of hidden ones nobody expects that they are read."""
        return ", ".join(f"{count} {reason}" for reason, count in self.skipped.items() if reason != "hidden")


def find_files(source: SourceSettings) -> SourceFiles:
    """The files of a source. Raises UserError when there is none to read.

    In a folder, links are not followed (they could lead out of it, or round in a circle), hidden names are not
    read, and empty files, sockets and the like are skipped; all of them are counted.
    """
    if source.path is None:
        return SourceFiles(source, None, [], [], {})
    root = source.path
    if root.is_file():
        if not _is_text(root):
            raise UserError(f"source {source.name}: {root}: expected {_expected()}, also .gz or .zst of the text kinds")
        size = root.stat().st_size
        if not size:
            raise UserError(f"source {source.name}: {root}: an empty file")
        return SourceFiles(source, root.parent, [root.name], [size], {})
    if not root.is_dir():
        raise UserError(f"source {source.name}: {root}: no file or folder of this name")
    found: list[tuple[str, int]] = []
    skipped: Counter[str] = Counter()
    _walk(root, "", found, skipped)
    if not found:
        rest = ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items()))
        raise UserError(f"source {source.name}: {root}: no {_expected()} in it{f' (skipped: {rest})' if rest else ''}")
    found.sort()
    return SourceFiles(
        source, root, [name for name, _ in found], [size for _, size in found], dict(sorted(skipped.items()))
    )


def _expected() -> str:
    return f"{', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]} file"


def _is_text(path: Path) -> bool:
    """Whether the name is that of a kind we read; parquet has its own packing and is not packed again."""
    return plain_suffix(path) in SUFFIXES and (plain_suffix(path) != ".parquet" or path.suffix.lower() == ".parquet")


def _walk(folder: Path, prefix: str, found: list[tuple[str, int]], skipped: Counter[str]) -> None:
    try:
        entries = list(os.scandir(folder))
    except PermissionError:
        raise UserError(f"{folder}: not readable by this user; change its permissions") from None
    for entry in entries:
        name = f"{prefix}{entry.name}"
        if entry.name.startswith("."):
            skipped["hidden"] += 1
        elif entry.is_symlink():
            skipped["link"] += 1
        elif entry.is_dir(follow_symlinks=False):
            _walk(Path(entry.path), f"{name}/", found, skipped)
        elif not entry.is_file(follow_symlinks=False):
            skipped["special file"] += 1
        elif not _is_text(Path(entry.name)):
            skipped["other kind"] += 1
        else:
            size = entry.stat(follow_symlinks=False).st_size
            if size:
                found.append((name, size))
            else:
                skipped["empty"] += 1


def assign_parts(sizes: list[int], parts: int) -> list[int]:
    """The part that reads each file: consecutive files stay together, and each part gets about as many bytes.

    Reading part after part is reading file after file, so the order of documents does not depend on `parts`.
    """
    total, before, chosen = sum(sizes), 0, []
    for size in sizes:
        chosen.append(min(before * parts // total, parts - 1) if total else 0)
        before += size
    return chosen
