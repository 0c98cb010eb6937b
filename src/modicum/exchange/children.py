"""A program of its own in which another runtime takes a file: what is wrong with the file ends it, and not us."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from modicum.store import UserError

# Slower than any machine that one would convert a model on, even one that is busy elsewhere.
_LEAST_SECONDS, _LOADED_A_SECOND, _PASSED_A_SECOND = 600.0, 50e6, 2e9


def limit_seconds(size: int, tokens: int) -> float:
    """What a runtime may take to load a file of `size` bytes and run `tokens` tokens of it; more is no end in sight."""
    return _LEAST_SECONDS + size / _LOADED_A_SECOND + tokens * size / _PASSED_A_SECOND


@contextmanager
def passing_folder(place: Path | None = None) -> Iterator[Path]:
    """A folder in `place`, or where the system has its own, that goes with all that is in it when the block ends.

    A network's disk keeps files that are still mapped, and their folder with them; that is no reason to fail.
    """
    with tempfile.TemporaryDirectory(prefix="modicum-", dir=place, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def run_child(
    program: str, arguments: Sequence[str | Path], *, name: str, runtime: str, limit: float
) -> subprocess.CompletedProcess[bytes]:
    """The ended program, which this Python has run. Raises UserError, `name` in front, when it takes over `limit` s."""
    command = [sys.executable, "-P", program, *map(str, arguments)]
    try:
        return subprocess.run(command, capture_output=True, timeout=limit, check=False, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise UserError(f"{name}: {runtime} did not end within {limit:g} s, so the file is not proven") from None
