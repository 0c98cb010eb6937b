"""The application object, and how every verb ends: one clear message and the right exit status."""

import errno
import functools
import importlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Annotated, Any

import typer

from modicum import __version__
from modicum.store import UserError

OURS, USERS, INTERRUPTED, UNREAD, TERMINATED = 1, 2, 130, 141, 143
# What the operating system refuses because of the user's machine, not because of us.
_MENDABLE = {
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG, errno.EMFILE, errno.ENOTDIR,
    errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP,
}  # fmt: skip
VERBS = (
    "new", "plan", "run", "stages", "generate", "chat", "import_", "export", "quantize", "serve", "doctor", "bench",
    "bench_decode", "bench_serve",
)  # fmt: skip

app = typer.Typer(
    name="modicum",
    help="Grow a small language model from a folder of text into a chat model, and prove every hop on the way.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"modicum {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of the program itself."""


bench = typer.Typer(help="Measure speed and memory here, beside a peer in the same run.", no_args_is_help=True)
app.add_typer(bench, name="bench")


def verb(name: str, example: str, *, group: typer.Typer = app) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function as `modicum NAME`; whatever it raises becomes a message and an exit status."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> None:
            status = _status(functools.partial(function, *args, **kwargs))
            if status:
                raise typer.Exit(status)

        group.command(name, epilog=f"Example: {example}")(guarded)
        return guarded

    return register


def _status(call: Callable[[], None]) -> int:
    try:
        with _terminable():
            call()
        if sys.stdout is not None:  # a launcher may have closed it
            sys.stdout.flush()
    except UserError as error:
        _complain(str(error))
        return USERS
    except KeyboardInterrupt as interrupt:
        _complain(str(interrupt) or "interrupted; run the same command again to go on", "stopped")
        return INTERRUPTED
    except _Terminated:
        _complain("by SIGTERM", "stopped")
        return TERMINATED
    except BrokenPipeError:
        return _unread()
    except OSError as error:
        if error.errno not in _MENDABLE:
            return _our_fault()
        _complain(f"{error.filename or 'writing a file'}: {error.strerror}")
        return USERS
    except typer.Exit:
        raise
    except Exception:
        return _our_fault()
    return 0


class _Terminated(BaseException):
    """SIGTERM: what is half written is cleared away on its way out, as with Ctrl-C; a second one does not stop that."""


@contextmanager
def _terminable() -> Iterator[None]:
    """Inside, SIGTERM raises _Terminated in the main thread of this process; what it forks ends by it as ever."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    owner = os.getpid()

    def end(number: int, _: FrameType | None) -> None:
        if os.getpid() != owner:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        signal.signal(number, signal.SIG_IGN)
        raise _Terminated

    former = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


def _unread() -> int:
    """The reader of our output has gone (`modicum ... | head`), perhaps before the work was done: as by SIGPIPE."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with suppress(OSError, ValueError):  # where it is no file
            os.dup2(nowhere, stream.fileno())  # or winding up would complain of what is still to be written
    os.close(nowhere)
    return UNREAD


def _our_fault() -> int:
    traceback.print_exc()
    _complain("this is a fault of modicum, not of your input; please report it with the lines above")
    return OURS


def _complain(text: str, kind: str = "error") -> None:
    with suppress(BrokenPipeError):  # nobody reads it; the status says what there is to say
        for line in text.splitlines():
            print(f"{kind}: {line}", file=sys.stderr)


def main() -> None:
    """Entry point of `modicum` and of `python -m modicum`."""
    for name in VERBS:
        importlib.import_module(f"modicum.cli.{name}")
    try:
        app()
    except SystemExit as end:
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            raise
        # A rank that torchrun has started: threads of PyTorch's connections, which stay open after an error, may abort
        # a process while Python winds it up, and torchrun would start it again.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))
