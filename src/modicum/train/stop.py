"""Stopping on SIGINT and SIGTERM: the update in hand is finished and saved first; a second SIGINT ends at once."""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self


class Interrupted(KeyboardInterrupt):
    """Training was asked to stop, and has saved what it had. The message says where, and how to go on."""


class StopRequest:
    """Inside its block, `wanted` turns true at the first SIGINT or SIGTERM. Outside the main thread it never does."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.wanted = False
        self._say = say
        self._former: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._former[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.wanted and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not self.wanted:
            self.wanted = True
            again = "; Ctrl-C again quits without saving" if number == signal.SIGINT else ""
            self._say(f"stopping: finishing this update and saving it{again}")
