"""One process at a time may work on a run."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from modicum.store.errors import UserError


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold the folder's lock while the block runs; the kernel frees it when the process ends, however it ends.

    Raises UserError when another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{folder}: another modicum process is at work on this run; wait for it, or stop it"
            ) from None
        yield
    finally:
        os.close(descriptor)
