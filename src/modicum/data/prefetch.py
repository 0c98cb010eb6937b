"""Work ahead of the consumer on one background thread: same items and exceptions, and no thread left behind."""

import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """Holds up to `depth` items of an iterator ready. The thread ends with close(), or when this object is dropped."""

    def __init__(self, items: Iterator[T], depth: int) -> None:
        self.wait_seconds = 0.0
        self._buffer: _Buffer[T] = _Buffer(depth)
        # the thread knows the buffer and not this object, which may therefore be collected while it runs
        thread = threading.Thread(target=_fill, args=(items, self._buffer), name="modicum-prefetch", daemon=True)
        self.close = weakref.finalize(self, _shut, self._buffer, thread)
        thread.start()

    def get(self) -> T:
        """The next item. Raises what the iterator raised (StopIteration at its end), after the items before it."""
        start = time.perf_counter()
        try:
            return self._buffer.take()
        finally:
            self.wait_seconds += time.perf_counter() - start


class _Buffer(Generic[T]):
    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.items: deque[T] = deque()
        self.end: BaseException | None = None
        self.closed = False
        self.changed = threading.Condition()

    def put(self, item: T) -> bool:
        """Wait for room and add the item; False when nobody wants more."""
        with self.changed:
            self.changed.wait_for(lambda: self.closed or len(self.items) < self.depth)
            self.items.append(item)
            self.changed.notify_all()
            return not self.closed

    def finish(self, reason: BaseException) -> None:
        with self.changed:
            self.end = reason
            self.changed.notify_all()

    def take(self) -> T:
        with self.changed:
            self.changed.wait_for(lambda: self.items or self.end is not None or self.closed)
            if self.closed:
                raise RuntimeError("taken from a closed prefetcher")
            if not self.items:
                assert self.end is not None
                raise self.end
            item = self.items.popleft()
            self.changed.notify_all()
            return item

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()


def _fill(items: Iterator[T], buffer: _Buffer[T]) -> None:
    try:
        for item in items:
            if not buffer.put(item):
                return
    except BaseException as error:  # whatever it is, it belongs to the consumer
        buffer.finish(error)
    else:
        buffer.finish(StopIteration())


def _shut(buffer: _Buffer[T], thread: threading.Thread) -> None:
    buffer.close()
    if thread is not threading.current_thread():  # a collection may run on the thread itself
        thread.join()
