"""Write a file or a folder so that a kill at any instant leaves the old one or the new one, never a part.

Order matters: contents reach the disk before the name does (fsync of files, then rename, then fsync of the parent).
"""

import glob
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from modicum.store.errors import UserError

_TEMPORARY, _ASIDE = ".tmp-", ".aside-"  # neither begins as the other, so none is taken for the other


def refuse_taken(out: Path) -> None:
    """Raise UserError unless `out` is free: not there, or an empty folder that can be replaced."""
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise UserError(f"{out}: is there already and is no folder; name a new one with --out")
    if out.is_dir() and any(out.iterdir()):
        raise UserError(f"{out}: is not empty; name a new folder with --out, or empty this one")
    if os.path.ismount(out):
        raise UserError(f"{out}: a disk is mounted there; name a folder in it with --out, such as {out / 'model'}")


def fsync_path(path: Path) -> None:
    """Flush a file's contents, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes(path: Path, data: bytes) -> None:
    """Replace `path` with `data` in one step."""
    temporary = path.with_name(f"{_TEMPORARY}{path.name}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_path(path.parent)


def write_text(path: Path, text: str) -> None:
    """Replace `path` with UTF-8 text in one step."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, value: Any) -> None:
    """Replace `path` with indented JSON in one step. Raises ValueError on NaN and infinity, which JSON cannot say."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


@contextmanager
def atomic_directory(final: Path) -> Iterator[Path]:
    """Yield an empty temporary folder beside `final`; when the block ends well, it becomes `final`.

    An existing `final` is replaced; for the instant between two renames only its set-aside copy exists, and
    `remove_leftovers` brings that back. When the block raises, nothing of it stays.
    """
    final = final.absolute()  # "." has a name of its own then
    final.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(final.parent, final.name)
    temporary = final.with_name(f"{_TEMPORARY}{final.name}")
    temporary.mkdir()
    try:
        yield temporary
        for path in temporary.rglob("*"):
            if path.is_file() or path.is_dir():
                fsync_path(path)
        fsync_path(temporary)
        replace_directory(temporary, final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def replace_directory(temporary: Path, final: Path) -> None:
    """Rename a finished folder to its name, setting an older one aside first (a folder cannot be renamed over)."""
    aside = final.with_name(f"{_ASIDE}{final.name}")
    if final.exists():
        final.rename(aside)
    temporary.rename(final)
    fsync_path(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


def remove_leftovers(parent: Path, name: str | None = None) -> None:
    """Clear what a killed process left in `parent`: half-written temporaries, and bring back a folder set aside.

    With `name`, only what belongs to that final name.
    """
    if not parent.is_dir():
        return
    names = "*" if name is None else glob.escape(name)
    for aside in parent.glob(f"{_ASIDE}{names}"):
        final = parent / aside.name.removeprefix(_ASIDE)
        if final.exists():
            _remove(aside)
        else:
            aside.rename(final)
    for leftover in parent.glob(f"{_TEMPORARY}{names}"):
        _remove(leftover)


def _remove(path: Path) -> None:
    """A file, a link (not what it leads to), or a folder with all that is in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
