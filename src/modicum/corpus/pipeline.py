"""The corpus as a list of datatrove pipelines, and an executor that runs them on this machine in silence.

A cluster runs the same stages in the same order, each with `tasks` tasks, through datatrove's Ray or Slurm executor.
"""

import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import multiprocess  # type: ignore[import-untyped]
from datatrove.executor.local import LocalPipelineExecutor
from datatrove.pipeline.base import PipelineStep
from loguru import logger

from modicum.corpus.contamination import Contamination
from modicum.corpus.inputs import SourceFiles, assign_parts
from modicum.corpus.judging import Decontaminate, Judge, Sign, length, repetition
from modicum.corpus.near import bands_for, candidate_steps
from modicum.corpus.outcomes import filters_of
from modicum.corpus.reading import Clean, ReadChunks, ReadSources, WriteChunks
from modicum.corpus.writing import Decide, WriteCorpus
from modicum.recipe import CorpusSettings


@dataclass(frozen=True)
class CorpusStage:
    """One pipeline; the next one starts when all of its tasks are done."""

    name: str
    tasks: int
    steps: list[PipelineStep]


def corpus_stages(
    settings: CorpusSettings,
    inputs: Sequence[SourceFiles],
    work: Path,
    out: Path,
    *,
    seed: int,
    decontaminate_against: Sequence[str],
) -> list[CorpusStage]:
    """The stages that turn `inputs` into documents/ and heldout/ in `out`, by way of the folder `work`.

    Writes into `work` which task reads which file and the index of evaluation texts; both folders must exist and be
    seen by all tasks.
    """
    inputs = sorted(inputs, key=lambda files: files.source.name)
    sources = [files.source for files in inputs]
    filters = {source.name: filters_of(settings, source) for source in sources}
    near = any(chosen.near_duplicates for chosen in filters.values())
    similarity = settings.near_duplicate_similarity
    _write_inputs(work, inputs, settings.tasks)
    index = work / "contamination.npz"
    Contamination.of(decontaminate_against, settings.decontaminate_words).save(index)
    stages = [
        CorpusStage("read", settings.tasks, [ReadSources(work, sources), Clean(), WriteChunks(work)]),
        CorpusStage(
            "filter",
            settings.tasks,
            [
                ReadChunks(work),
                Judge("length", length, filters),
                Judge("repetition", repetition, filters),
                Judge("evaluation items", Decontaminate(index), filters),
                Sign(work, filters, seed, similarity if near else None),
            ],
        ),
    ]
    if near:
        stages.append(CorpusStage("near duplicates", bands_for(similarity)[0], candidate_steps(work, similarity)))
    decision = Decide(
        work,
        exact=any(chosen.exact_duplicates for chosen in filters.values()),
        near=near,
        similarity=similarity,
        heldout_fraction=settings.heldout_fraction,
        memory_bytes=settings.memory_mb * 2**20 // 2,
    )
    stages.append(CorpusStage("decide", 1, [decision]))
    names = [source.name for source in sources]
    stages.append(CorpusStage("write", len(names), [WriteCorpus(work, out, names)]))
    return stages


def _write_inputs(work: Path, inputs: Sequence[SourceFiles], parts: int) -> None:
    entries: list[dict[str, Any]] = []
    sizes: list[int] = []
    for number, files in enumerate(inputs):
        if files.root is None:
            entries.append({"source": number, "root": None, "name": None})
            sizes.append(2**20)  # not known before it is read
        else:
            entries += [{"source": number, "root": str(files.root), "name": name} for name in files.names]
            sizes += files.sizes
    chosen = assign_parts(sizes, parts)
    for part in range(parts):
        mine = [entry for entry, its_part in zip(entries, chosen, strict=True) if its_part == part]
        (work / f"inputs-{part:06d}.json").write_text(json.dumps(mine), "utf-8")


def run_stages(
    stages: Sequence[CorpusStage], logs: Path, *, workers: int, progress: Callable[[str], None] | None = None
) -> None:
    """Run the stages one after the other, `workers` tasks at a time."""
    with _silence():
        for stage in stages:
            executor = QuietExecutor(stage, logs / stage.name.replace(" ", "-"), workers)
            for done in executor.results():
                if progress is not None:
                    progress(f"corpus: {stage.name}, {done} of {stage.tasks}")


class QuietExecutor(LocalPipelineExecutor):  # type: ignore[misc]
    """datatrove's local executor without its manager process, which would outlive this one if it were killed, and
    without its messages. One worker means this process."""

    def __init__(self, stage: CorpusStage, logs: Path, workers: int) -> None:
        super().__init__(stage.steps, tasks=stage.tasks, workers=min(workers, stage.tasks), logging_dir=str(logs))
        self.stage = stage

    def run(self) -> None:
        deque(self.results(), maxlen=0)

    def results(self) -> Iterator[int]:
        """Run all tasks; yields how many are done each time one is."""
        if self.workers == 1:
            for rank in range(self.tasks):
                self.pipeline = deepcopy(self.stage.steps)
                self._run_for_rank(rank)
                yield rank + 1
            return
        context = multiprocess.get_context(self.start_method)
        with context.Pool(self.workers, initializer=_start_worker) as pool:
            for done, _ in enumerate(pool.imap_unordered(self._run_for_rank, range(self.tasks)), 1):
                yield done


def _start_worker() -> None:
    """A worker leaves Ctrl-C to the process that started it, and says nothing."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logger.disable("datatrove")


@contextmanager
def _silence() -> Iterator[None]:
    """Without datatrove's messages, and with the environment as it was afterwards."""
    before = dict(os.environ)
    logger.disable("datatrove")
    try:
        yield
    finally:
        logger.enable("datatrove")
        for name in set(os.environ) - set(before):
            if name.startswith("DATATROVE_"):
                del os.environ[name]
