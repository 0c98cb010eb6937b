"""Pipeline steps that read: from the sources into cleaned chunks, and from the chunks again.

Like all our steps they are datatrove's, so that any of its executors can run them, and hold no data.
"""

import json
import math
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from datatrove.data import Document as PipelineDocument
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.formatters.base import BaseFormatter

from modicum.corpus.chunks import read_chunk, read_chunk_list, write_chunks
from modicum.corpus.clean import clean
from modicum.corpus.outcomes import TRAIN
from modicum.corpus.records import Record, read_file, read_hub
from modicum.recipe import SourceSettings
from modicum.store import UserError

FAULTS_AT_ONCE, LOOK_ON_SECONDS = 20, 5.0  # of files that cannot be read: so many are told of, sought for so long

Documents = Iterable[PipelineDocument]


class ReadSources(PipelineStep):  # type: ignore[misc]
    """The documents of the files that the work folder's inputs-<task>.json assigns to this task.

    After the first fault nothing more is handed on, and other files are looked at for such faults, for a few seconds.
    Raises UserError with the first fault of each file.
    """

    type = "read"
    name = "sources"

    def __init__(self, work: Path, sources: list[SourceSettings]) -> None:
        super().__init__()
        self.work = work
        self.sources = sources

    def run(self, data: Documents | None = None, rank: int = 0, _world_size: int = 1) -> Iterator[PipelineDocument]:
        yield from data or ()
        faults: list[str] = []
        until = math.inf
        for entry in json.loads((self.work / f"inputs-{rank:06d}.json").read_text("utf-8")):
            source, root = self.sources[entry["source"]], entry["root"]
            if faults and root is None:
                continue  # nothing is fetched for a corpus that cannot be made
            try:
                for record in read_hub(source) if root is None else read_file(source, Path(root), entry["name"]):
                    if not faults:
                        yield PipelineDocument(
                            record.text, record.id, metadata={"record": record, "source": source.name}
                        )
                    elif time.monotonic() > until:
                        break
            except UserError as error:
                until = min(until, time.monotonic() + LOOK_ON_SECONDS)
                faults.append(str(error))
            if len(faults) == FAULTS_AT_ONCE or time.monotonic() > until:
                break
        if faults:
            raise UserError("\n".join(faults))


class Clean(BaseFormatter):  # type: ignore[misc]
    """NFC, line ends, control characters."""

    name = "clean"

    def format(self, text: str) -> str:
        return clean(text)


class WriteChunks(PipelineStep):  # type: ignore[misc]
    """Write the cleaned documents of this task to disk."""

    type = "write"
    name = "chunks"

    def __init__(self, work: Path) -> None:
        super().__init__()
        self.work = work

    def run(self, data: Documents, rank: int = 0, _world_size: int = 1) -> None:
        def cleaned() -> Iterator[tuple[str, Record]]:
            for document in data:
                record: Record = document.metadata["record"]
                yield document.metadata["source"], Record(**{**vars(record), "text": document.text})

        write_chunks(self.work, rank, cleaned())


class ReadChunks(PipelineStep):  # type: ignore[misc]
    """The documents of every `world_size`-th chunk; metadata["outcome"] says that none is dropped yet."""

    type = "read"
    name = "chunks"

    def __init__(self, work: Path) -> None:
        super().__init__()
        self.work = work

    def run(self, data: Documents | None = None, rank: int = 0, world_size: int = 1) -> Iterator[PipelineDocument]:
        yield from data or ()
        for chunk in read_chunk_list(self.work)[rank::world_size]:
            for record in read_chunk(self.work, chunk):
                metadata = {"record": record, "chunk": chunk.number, "source": chunk.source, "outcome": TRAIN}
                yield PipelineDocument(record.text, record.id, metadata=metadata)
