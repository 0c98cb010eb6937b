"""The corpus as a list of datatrove pipelines.

executor.py runs them here; on a cluster datatrove's Ray or Slurm executor runs the same stages in the same order, each
with its number of tasks, when all tasks of the one before are done.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datatrove.pipeline.base import PipelineStep

from modicum.corpus.contamination import Contamination
from modicum.corpus.inputs import SourceFiles, assign_parts
from modicum.corpus.judging import Decontaminate, Judge, Sign, length, repetition
from modicum.corpus.near import bands_for, shared_bands
from modicum.corpus.outcomes import filters_of
from modicum.corpus.reading import Clean, ReadChunks, ReadSources, WriteChunks
from modicum.corpus.writing import Decide, WriteCorpus
from modicum.recipe import CorpusSettings


@dataclass(frozen=True)
class CorpusStage:
    """One pipeline, and into how many tasks it is split."""

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
        stages.append(CorpusStage("near duplicates", bands_for(similarity)[0], [shared_bands(work, similarity)]))
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
