"""datatrove's local executor without what a user need not see or clean up.

The original starts a manager process that outlives this one when it is killed, writes log and statistics files for
every task, and speaks on stderr.
"""

import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from multiprocessing import get_context
from multiprocessing.pool import Pool
from pathlib import Path

from datatrove.executor.local import LocalPipelineExecutor
from datatrove.pipeline.base import PipelineStep
from loguru import logger

from modicum.corpus.pipeline import CorpusStage


def run_stages(
    stages: Sequence[CorpusStage], logs: Path, *, workers: int, progress: Callable[[str], None] | None = None
) -> None:
    """Run the stages one after the other, `workers` tasks at a time; one worker is this process."""
    with _silence(), _worker_pool(workers) as pool:
        for stage in stages:
            for done in QuietExecutor(stage, logs, pool).results():
                if progress is not None:
                    progress(f"corpus: {stage.name}, {done} of {stage.tasks}")


class QuietExecutor(LocalPipelineExecutor):  # type: ignore[misc]
    """Runs one stage in `pool`, or in this process without one."""

    def __init__(self, stage: CorpusStage, logs: Path, pool: Pool | None) -> None:
        super().__init__(stage.steps, tasks=stage.tasks, logging_dir=str(logs))
        self._stage = stage
        self._pool = pool

    def run(self) -> None:
        deque(self.results(), maxlen=0)

    def results(self) -> Iterator[int]:
        """Run all tasks; each time one is done, yields how many are."""
        tasks = [(self._stage.steps, rank, self._stage.tasks) for rank in range(self._stage.tasks)]
        finished = map(_run_task, tasks) if self._pool is None else self._pool.imap_unordered(_run_task, tasks)
        for done, _ in enumerate(finished, 1):
            yield done


def _run_task(task: tuple[list[PipelineStep], int, int]) -> None:
    """Pipe each step's documents into the next one's. A step keeps state, so that each task works with its own copy."""
    steps, rank, tasks = task
    documents = None
    for step in deepcopy(steps):
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
