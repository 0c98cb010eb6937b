"""SHA-256 of large inputs, remembered by size and modification time, so that a look at an unchanged corpus is quick."""

import json
import os
from collections.abc import Iterable
from pathlib import Path

from modicum.store.atomic import write_json
from modicum.store.hashes import hash_file, hash_json, hash_tree


class Fingerprints:
    """Hashes of files and folders, kept in one JSON file of the run.

    A file whose size and modification time (nanoseconds) are as before is not read again; `touch` makes it be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            known = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError, RecursionError):
            known = None  # no memory, or a damaged one: all is read again
        entries = known.items() if isinstance(known, dict) else ()
        self._known: dict[str, list[int | str]] = {
            name: entry
            for name, entry in entries
            if isinstance(entry, list) and [type(part) for part in entry] == [int, int, str]
        }

    def of(self, path: Path) -> str:
        """SHA-256 of a file, or of the names and contents of the files below a folder."""
        return hash_tree(path, self._file)

    def of_files(self, root: Path, names: Iterable[str]) -> str:
        """SHA-256 of the names and contents of some files below a folder, their names relative to it."""
        return hash_json({name: self._file(root / name) for name in names})

    def save(self) -> None:
        """Write what was learnt."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._path, self._known)

    def _file(self, path: Path) -> str:
        status = path.stat()
        name = os.fsencode(path).decode("utf-8", "backslashreplace")  # a file's name need not be UTF-8
        known = self._known.get(name)
        if known and known[:2] == [status.st_size, status.st_mtime_ns]:
            return str(known[2])
        digest = hash_file(path)
        self._known[name] = [status.st_size, status.st_mtime_ns, digest]
        return digest
