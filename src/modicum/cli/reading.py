"""What a user types or pipes in."""

from collections.abc import Callable


def read_text(read: Callable[[], str]) -> str:
    """What `read` takes from standard input. Raises UserError where that is no text."""
    from modicum.store import UserError

    try:
        return read()
    except UnicodeDecodeError as error:
        raise UserError(f"standard input: not {error.encoding.upper()} text (byte {error.start})") from None
