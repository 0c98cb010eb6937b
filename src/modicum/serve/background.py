"""Work in threads that the process does not wait for when it ends, as it would for asyncio's own."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


class Background:
    """Such threads."""

    def __init__(self) -> None:
        self._threads = set[threading.Thread]()

    @property
    def at_work(self) -> int:
        """How many of them have not ended."""
        return len(self._threads)

    async def run(self, work: Callable[[], T]) -> T:
        """What `work()` gives or raises. When the caller is cancelled, it goes on for nobody."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def tell(what: Callable[[Any], None], value: Any) -> None:
            self._threads.discard(thread)
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(lambda: None if done.done() else what(value))

        def run() -> None:
            try:
                made = work()
            except BaseException as error:
                tell(done.set_exception, error)
            else:
                tell(done.set_result, made)

        thread = threading.Thread(target=run, name="modicum-background", daemon=True)
        self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError:  # the machine has no room for it
            self._threads.discard(thread)
            raise
        return await done
