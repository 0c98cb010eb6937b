"""The one exception that speaks to the user."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class UserError(Exception):
    """Something the user can mend: the message names the file, line or field, what was expected, and how to mend it.

    The command line prints it without a traceback and exits with status 2. Several faults of one input are one error
    with a line each, so that they are mended in one go. Anything else that escapes is our fault: status 1.
    """


@contextmanager
def written_by_numpy(path: Path) -> Iterator[None]:
    """Inside, NumPy writes `path`: its OSError of a full disk, which has no number, becomes a UserError.

    One that the operating system numbers passes through as it is.
    """
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            raise
        raise UserError(f"{path}: could not be written ({error}); make room on the disk") from None
