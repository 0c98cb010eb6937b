"""SHA-256 of files, folders and plain data: how a stage knows whether its inputs changed."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def hash_file(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes, read in blocks. Raises OSError when it cannot be read."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_json(value: Any) -> str:
    """Hexadecimal SHA-256 of plain data (dict, list, str, int, float, bool, None), independent of key order.

    Raises TypeError for anything else: a hash of an object's repr would change with its address.
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def hash_tree(path: Path, hash_one: Callable[[Path], str] = hash_file) -> str:
    """SHA-256 of a file, or of the relative names and contents of every file below a folder.

    A link counts as the file that it leads to, since a download cache may hold nothing but links; hidden files, linked
    folders, sockets and pipes are left out.
    """
    if path.is_file():
        return hash_one(path)
    files = sorted(
        file
        for file in path.rglob("*")
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )
    return hash_json({file.relative_to(path).as_posix(): hash_one(file) for file in files})
