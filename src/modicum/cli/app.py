"""The application object, and how every verb ends: one clear message and the right exit status."""

import errno
import functools
import importlib
import os
import sys
import traceback
from collections.abc import Callable
from typing import Annotated, Any

import typer

from modicum import __version__
from modicum.store import UserError

OURS, USERS, INTERRUPTED = 1, 2, 130
# What the operating system refuses because of the user's machine, not because of us.
_MENDABLE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG, errno.EMFILE}
VERBS = (
    "new", "plan", "run", "stages", "generate", "chat", "import_", "export", "quantize", "serve", "doctor", "bench",
    "bench_decode",
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
        call()
    except UserError as error:
        _complain(str(error))
        return USERS
    except KeyboardInterrupt as interrupt:
        _complain(str(interrupt) or "interrupted; run the same command again to go on", "stopped")
        return INTERRUPTED
    except BrokenPipeError:
        return 0  # the reader of our output has seen enough (`modicum ... | head`)
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


def _our_fault() -> int:
    traceback.print_exc()
    _complain("this is a fault of modicum, not of your input; please report it with the lines above")
    return OURS


def _complain(text: str, kind: str = "error") -> None:
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
