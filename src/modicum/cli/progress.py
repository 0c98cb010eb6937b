"""Progress as people read it: a bar with the time left on a terminal, a plain line now and then elsewhere."""

import sys
import time
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from modicum.cli.console import PlainConsole

_SECONDS_BETWEEN_LINES = 20.0


class TerminalListener:
    """Lines and one bar on standard error; standard output stays free for what a verb prints."""

    def __init__(self) -> None:
        self._console = PlainConsole(stderr=True)
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._started: tuple[int, float] | None = None
        self._last_line = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_bar()

    def say(self, text: str) -> None:
        """One line that stays; a bar above it is over."""
        self._end_bar()
        self._console.print(text, markup=False)

    def progress(self, done: int, total: int, text: str) -> None:
        """The work in hand stands at `done` of `total`."""
        if self._console.is_terminal:
            self._draw(done, total, text)
        else:
            self._print_sometimes(done, total, text)

    def _draw(self, done: int, total: int, text: str) -> None:
        if self._bar is None:
            columns = (BarColumn(), TextColumn("{task.completed}/{task.total}"), TextColumn("{task.description}"))
            self._bar = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=self._console)
            self._bar.start()
            # what an earlier process did must not count as this one's speed
            self._task = self._bar.add_task("", total=total or None, completed=done)
        assert self._task is not None
        self._bar.update(self._task, completed=done, total=total or None, description=text, refresh=False)

    def _print_sometimes(self, done: int, total: int, text: str) -> None:
        now = time.monotonic()
        if self._started is None or done < self._started[0]:
            self._started = (done, now)
        first, since = self._started
        if now - self._last_line < _SECONDS_BETWEEN_LINES and (done < total or not total):
            return
        self._last_line = now
        if not total:
            print(f"  {text}", file=sys.stderr, flush=True)
            return
        left = (now - since) / (done - first) * (total - done) if done > first else None
        rest = "" if left is None or done >= total else f", {left / 60:.1f} min left"
        print(f"  {done}/{total} {text}{rest}", file=sys.stderr, flush=True)

    def _end_bar(self) -> None:
        self._started = None
        if self._bar is not None:
            self._bar.stop()
            self._bar = self._task = None
