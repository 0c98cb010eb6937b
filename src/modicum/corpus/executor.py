"""datatrove's local executor without what a user need not see or clean up.

The original starts a manager process that outlives this one when it is killed, writes log and statistics files for
every task, and speaks on stderr.
"""

import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from multiprocessing import TimeoutError as NothingYet
from multiprocessing import get_context
from multiprocessing.pool import Pool
from pathlib import Path

from datatrove.data import Document
from datatrove.executor.local import LocalPipelineExecutor
from datatrove.pipeline.base import PipelineStep
from loguru import logger

from modicum.corpus.pipeline import CorpusStage
from modicum.store import UserError


def run_stages(
    stages: Sequence[CorpusStage], logs: Path, *, workers: int, progress: Callable[[str], None] | None = None
) -> None:
    """Run the stages one after the other, `workers` tasks at a time; one worker is this process."""
    progress = progress or (lambda _: None)
    with _silence(), _worker_pool(workers) as pool:
        for stage in stages:
            ticker = Ticker(f"corpus: {stage.name}", progress)
            for done in QuietExecutor(stage, logs, pool, ticker).results():
                ticker.say(f"{done} of {stage.tasks}", now=done == stage.tasks)


Task = tuple[list[PipelineStep], int, int]  # steps of a stage; the task's number, and of how many


class Ticker:
    """Says how far a stage is, at most once a second; as a step between two others it counts the documents."""

    def __init__(self, stage: str, progress: Callable[[str], None]) -> None:
        self._stage = stage
        self._progress = progress
        self._documents = 0
        self._said = time.monotonic()

    def say(self, how_far: str, *, now: bool = False) -> None:
        if now or time.monotonic() - self._said > 1:
            self._said = time.monotonic()
            self._progress(f"{self._stage}, {how_far}")

    def __call__(self, documents: Iterable[Document], _rank: int, _tasks: int) -> Iterator[Document]:
        for document in documents:
            self._documents += 1
            self.say(f"{self._documents:,} documents")
            yield document


class QuietExecutor(LocalPipelineExecutor):  # type: ignore[misc]
    """Runs one stage in `pool`, or without one in this process, where the ticker can count documents."""

    def __init__(self, stage: CorpusStage, logs: Path, pool: Pool | None, ticker: Ticker) -> None:
        super().__init__(stage.steps, tasks=stage.tasks, logging_dir=str(logs))
        self._stage = stage
        self._pool = pool
        self._ticker = ticker

    def run(self) -> None:
        deque(self.results(), maxlen=0)

    def results(self) -> Iterator[int]:
        """Run all tasks; each time one is done, yields how many are. Raises UserError when a worker is killed."""
        tasks = [(self._stage.steps, rank, self._stage.tasks) for rank in range(self._stage.tasks)]
        here = partial(_run_task, ticker=self._ticker)
        finished = map(here, tasks) if self._pool is None else _run_tasks(self._pool, tasks)
        for done, _ in enumerate(finished, 1):
            yield done


def _run_tasks(pool: Pool, tasks: list[Task]) -> Iterator[None]:
    """The tasks as they end. A pool puts another worker in a killed one's place, but never ends that one's task.

    Raises UserError when a worker is killed at its task; one that is killed while it waits may hold the pool up.
    """
    workers = _process_ids(pool)
    finished = pool.imap_unordered(_run_task, tasks)
    while True:
        try:
            yield finished.next(timeout=1)
        except StopIteration:
            return
        except NothingYet:
            if _process_ids(pool) != workers:
                raise UserError(
                    "corpus: a worker was killed, as happens where memory runs out; lower corpus.workers or "
                    "corpus.memory_mb, and run again"
                ) from None


def _process_ids(pool: Pool) -> set[int | None]:
    return {worker.pid for worker in pool._pool}  # type: ignore[attr-defined]  # the pool does not tell otherwise


def _run_task(task: Task, ticker: Ticker | None = None) -> None:
    """Pipe each step's documents into the next one's. A step keeps state, so that each task works with its own copy."""
    steps, rank, tasks = task
    first, *rest = deepcopy(steps)
    between = [ticker] if ticker is not None and rest else []
    documents = first(None, rank, tasks)
    for step in [*between, *rest]:
        documents = step(documents, rank, tasks)
    deque(documents or (), maxlen=0)


@contextmanager
def _worker_pool(workers: int) -> Iterator[Pool | None]:
    """Fresh processes, which end when this one does, however it ends: their pipe from it closes."""
    if workers == 1:
        yield None
        return
    with get_context("forkserver").Pool(workers, initializer=_start_worker) as pool:
        yield pool


def _start_worker() -> None:
    """A worker leaves Ctrl-C to the process that started it, and says nothing."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logger.disable("datatrove")


@contextmanager
def _silence() -> Iterator[None]:
    logger.disable("datatrove")
    try:
        yield
    finally:
        logger.enable("datatrove")
