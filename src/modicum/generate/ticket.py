"""What a caller of the engine holds: the pieces of one answer as they come, from another thread."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator

from modicum.generate.answer import Chunk
from modicum.generate.decoding import Request

_LOG = logging.getLogger("modicum.generate")


class QueueFull(Exception):  # noqa: N818  what happened, in the words of the callers
    """The engine has as many requests waiting as it takes; try again later."""


class Ticket:
    """One request's answer. Either iterate over it, once, or `subscribe`; both give the Chunks in order, an error last.

    prompt_tokens: the prompt's length. cached_tokens: how many of them were not computed again, known from the first
    chunk on. asked, begun, counted: for the engine's numbers: when it was made, whether any token was given out, how
    many are counted.
    """

    def __init__(self, request: Request, cancel: Callable[[], None]) -> None:
        self.request = request
        self._cancel = cancel
        self._lock = threading.RLock()
        self._pieces: queue.SimpleQueue[Chunk | Exception] = queue.SimpleQueue()
        self._callback: Callable[[Chunk | Exception], None] | None = None
        self.cancelled = False
        self.asked, self.begun, self.counted = time.perf_counter(), False, 0

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.answer.prompt)

    @property
    def cached_tokens(self) -> int:
        return self.request.cached

    def __iter__(self) -> Iterator[Chunk]:
        """Waits for each piece. Raises what ended the request, where that was an error."""
        while True:
            piece = self._pieces.get()
            if isinstance(piece, Exception):
                raise piece
            yield piece
            if piece.finish_reason is not None:
                return

    def subscribe(self, callback: Callable[[Chunk | Exception], None]) -> None:
        """Call back with every piece, at once with those that came already, later in the engine's thread.

        One that raises is called no more, and the request is cancelled.
        """
        with self._lock:
            self._callback = callback
            while not self._pieces.empty():
                self._call(self._pieces.get())

    def cancel(self) -> None:
        """Nobody wants the rest: the slot is free at the next step, and the last chunk says "cancelled"."""
        self.cancelled = True
        self._cancel()

    def deliver(self, piece: Chunk | Exception) -> None:
        """The engine's side: one more piece."""
        with self._lock:
            if self._callback is None:
                self._pieces.put(piece)
            else:
                self._call(piece)

    def _call(self, piece: Chunk | Exception) -> None:
        assert self._callback is not None
        try:
            self._callback(piece)
        except Exception:
            _LOG.exception("a subscriber failed; its request is cancelled")
            self._callback = _nobody
            self.cancel()


def _nobody(piece: Chunk | Exception) -> None:
    """Takes what is still said to a subscriber that failed."""
