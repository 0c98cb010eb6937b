import gc
import threading
import time
from collections.abc import Iterator

import pytest

from modicum.data import Prefetcher


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "modicum-prefetch"]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    assert prefetch_threads() == []
    yield
    gc.collect()
    assert prefetch_threads() == []


def test_items_come_in_order_and_the_end_is_the_end() -> None:
    prefetcher = Prefetcher(iter(range(100)), depth=3)
    assert [prefetcher.get() for _ in range(100)] == list(range(100))
    for _ in range(2):
        with pytest.raises(StopIteration):
            prefetcher.get()


def test_no_more_than_depth_items_are_made_ahead() -> None:
    made: list[int] = []

    def items() -> Iterator[int]:
        for i in range(100):
            made.append(i)
            yield i

    prefetcher = Prefetcher(items(), depth=3)
    for taken in range(5):
        deadline = time.monotonic() + 5
        while len(made) < taken + 4 and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.01)
        assert len(made) == taken + 4  # three wait in the buffer, one in the thread's hand
        assert prefetcher.get() == taken
    prefetcher.close()


def test_an_exception_reaches_the_consumer_after_the_items_before_it() -> None:
    def items() -> Iterator[int]:
        yield 1
        yield 2
        raise KeyError("the third")

    prefetcher = Prefetcher(items(), depth=8)
    assert [prefetcher.get(), prefetcher.get()] == [1, 2]
    for _ in range(2):  # asking again does not hang
        with pytest.raises(KeyError, match="the third"):
            prefetcher.get()


def test_closing_ends_the_thread_even_when_the_buffer_is_full() -> None:
    prefetcher = Prefetcher(iter(range(10**9)), depth=2)
    prefetcher.get()
    time.sleep(0.1)  # until the thread waits for room
    assert len(prefetch_threads()) == 1
    prefetcher.close()
    assert prefetch_threads() == []
    prefetcher.close()
    with pytest.raises(RuntimeError, match="closed"):
        prefetcher.get()


def test_dropping_the_object_ends_the_thread() -> None:
    prefetcher = Prefetcher(iter(range(10**9)), depth=2)
    prefetcher.get()
    del prefetcher
    gc.collect()
    assert prefetch_threads() == []


def test_waiting_is_measured() -> None:
    def items() -> Iterator[int]:
        for i in range(2):
            time.sleep(0.2)
            yield i

    slow = Prefetcher(items(), depth=1)
    slow.get()
    assert 0.15 < slow.wait_seconds < 5
    time.sleep(0.5)
    before = slow.wait_seconds
    slow.get()
    assert slow.wait_seconds - before < 0.1
