"""Pipeline steps that judge each document by itself, and write what the decision about the whole corpus needs.

A document that must go is marked, not taken out of the stream, so that every one is counted in the end.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import BinaryIO

import numpy as np
from datatrove.data import Document as PipelineDocument
from datatrove.pipeline.base import PipelineStep

from modicum.corpus.chunks import RECORD, hash_pair, split_key
from modicum.corpus.contamination import Contamination
from modicum.corpus.near import Signatures
from modicum.corpus.outcomes import CONTAMINATED, EMPTY, REPETITIVE, TOO_LONG, TOO_SHORT, TRAIN
from modicum.corpus.records import Record, second_id
from modicum.corpus.repetition import repeats_itself
from modicum.recipe import FilterSettings

Documents = Iterable[PipelineDocument]
Filters = dict[str, FilterSettings]  # source name to its filters
Verdict = Callable[[str, FilterSettings], int]  # the text of a document to TRAIN or the reason to drop it


class Judge(PipelineStep):  # type: ignore[misc]
    """Mark the documents that `verdict` drops, among those that nothing dropped before."""

    type = "judge"

    def __init__(self, name: str, verdict: Verdict, filters: Filters) -> None:
        super().__init__()
        self.name = name
        self.verdict = verdict
        self.filters = filters

    def run(self, data: Documents, _rank: int = 0, _world_size: int = 1) -> Iterator[PipelineDocument]:
        for document in data:
            if document.metadata["outcome"] == TRAIN:
                filters = self.filters[document.metadata["source"]]
                document.metadata["outcome"] = self.verdict(document.text, filters)
            yield document


def length(text: str, filters: FilterSettings) -> int:
    """Blank documents go always, short and long ones where the filter is on."""
    if not text or text.isspace():
        return EMPTY
    if filters.length and len(text) < filters.min_characters:
        return TOO_SHORT
    return TOO_LONG if filters.length and len(text) > filters.max_characters else TRAIN


def repetition(text: str, filters: FilterSettings) -> int:
    return REPETITIVE if filters.repetition and repeats_itself(text) else TRAIN


class Decontaminate:
    """The verdict of an index of evaluation texts, which lies on disk and is read where it is needed."""

    def __init__(self, index: Path) -> None:
        self.index = index

    @cached_property
    def _contamination(self) -> Contamination:
        return Contamination.load(self.index)

    def __call__(self, text: str, _: FilterSettings) -> int:
        return CONTAMINATED if self._contamination.found_in(text) else TRAIN


class Sign(PipelineStep):  # type: ignore[misc]
    """Write the record of each document and, where near duplicates are looked for, its signature."""

    type = "sign"
    name = "records and signatures"

    def __init__(self, work: Path, filters: Filters, seed: int, similarity: float | None) -> None:
        super().__init__()
        self.work = work
        self.filters = filters
        self.seed = seed
        self.similarity = similarity

    def run(self, data: Documents, _rank: int = 0, _world_size: int = 1) -> None:
        (self.work / "records").mkdir(exist_ok=True)
        signatures = None if self.similarity is None else Signatures(self.work, self.similarity)
        for number, documents in groupby(data, key=lambda document: document.metadata["chunk"]):
            with (self.work / "records" / f"{number}.bin").open("wb") as file:
                texts = self._write_records(documents, file)
                if signatures is not None:
                    signatures.sign(number, texts)
                else:
                    for _ in texts:
                        pass

    def _write_records(self, documents: Documents, file: BinaryIO) -> Iterator[str]:
        """Write a record for each document; yields its text, or an empty one when it is dropped."""
        for document in documents:
            record: Record = document.metadata["record"]
            outcome = document.metadata["outcome"]
            filters = self.filters[document.metadata["source"]]
            text = hash_pair(document.text)
            names = hash_pair(record.id), hash_pair(second_id(record))
            switches = filters.exact_duplicates, filters.near_duplicates
            row = (text, *names, split_key(text, self.seed), outcome, *switches)
            file.write(np.array([row], RECORD).tobytes())
            yield document.text if outcome == TRAIN else ""
