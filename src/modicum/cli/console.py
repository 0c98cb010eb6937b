"""The console that lines for people are written to."""

from typing import Any

from rich.console import Console


class PlainConsole(Console):
    """One whose closed pipe is an error like that of `print`, where rich would end the process with status 1."""

    def __init__(self, **how: Any) -> None:
        super().__init__(highlight=False, soft_wrap=True, **how)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError
