"""The corpus between two steps: cleaned documents in numbered chunks on disk, and a fixed-size record for each.

Counting through the chunks in the order of their numbers gives each document its place in the corpus, the same for
any number of parts and workers. Chunks are temporary and packed fast.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import orjson
import zstandard

from modicum.corpus.files import OWN_LIMIT, read_json_lines
from modicum.corpus.records import Record

MAX_DOCUMENTS = 250_000
MAX_BYTES = 2**30
_FIRST_BYTES = 2**24  # small chunks first, for many workers; larger ones later, since all are open at once in one step
_FIRST = 100_000_000  # with it, every number has nine digits, and names sort as numbers do
_PER_PART = 10_000

# What is known of a document without its text. id and place: hashes, the second for when the first is taken.
RECORD = np.dtype(
    [
        ("text", "<u8", 2),
        ("id", "<u8", 2),
        ("place", "<u8", 2),
        ("split", "<u8"),
        ("outcome", "u1"),
        ("exact", "?"),
        ("near", "?"),
    ]
)


@dataclass(frozen=True)
class Chunk:
    """Documents of one source; `start` is the place of its first document in the corpus."""

    number: int
    source: str
    documents: int
    start: int

    def text_path(self, work: Path) -> Path:
        return work / "chunks" / f"{self.number}.jsonl.zst"

    def record_path(self, work: Path) -> Path:
        return work / "records" / f"{self.number}.bin"

    def records(self, work: Path) -> npt.NDArray[Any]:
        """The chunk's records, shape (documents,), dtype RECORD."""
        return np.fromfile(self.record_path(work), RECORD)


def write_chunks(work: Path, part: int, records: Iterable[tuple[str, Record]]) -> None:
    """Write (source name, record) pairs as the chunks of one part, and the list of them.

    A new chunk begins where the source changes or the last one is full.
    """
    (work / "chunks").mkdir(parents=True, exist_ok=True)
    written: list[dict[str, Any]] = []
    for source, group in groupby(records, key=lambda pair: pair[0]):
        waiting = (record for _, record in group)
        for first in waiting:
            if len(written) == _PER_PART:
                raise RuntimeError("too many chunks for one part of the corpus")
            number = _FIRST + part * _PER_PART + len(written)
            full = min(_FIRST_BYTES << (len(written) // 16), MAX_BYTES)
            with zstd_lines(work / "chunks" / f"{number}.jsonl.zst", level=1) as lines:
                lines.write(vars(first))
                while lines.count < MAX_DOCUMENTS and lines.bytes < full:
                    record = next(waiting, None)
                    if record is None:
                        break
                    lines.write(vars(record))
            written.append({"number": number, "source": source, "documents": lines.count})
    (work / "chunks" / f"part-{part:06d}.json").write_text(json.dumps(written), "utf-8")


def read_chunk_list(work: Path) -> list[Chunk]:
    """All chunks in the order of the corpus."""
    chunks, start = [], 0
    for path in sorted((work / "chunks").glob("part-*.json")):
        for entry in json.loads(path.read_text("utf-8")):
            chunks.append(Chunk(start=start, **entry))
            start += entry["documents"]
    return chunks


def read_chunk(work: Path, chunk: Chunk) -> Iterator[Record]:
    for _, record in read_json_lines(chunk.text_path(work), OWN_LIMIT):
        yield Record(**record)


class zstd_lines:  # noqa: N801 (used as a function)
    """Write JSON lines into a .zst file: fixed level, a checksum, nothing of time or machine in it."""

    def __init__(self, path: Path, *, level: int) -> None:
        self._path = path
        self._level = level
        self.count = 0
        self.bytes = 0

    def __enter__(self) -> "zstd_lines":
        self._file: BinaryIO = self._path.open("wb")
        self._packer = zstandard.ZstdCompressor(self._level, write_checksum=True).compressobj()
        return self

    def write(self, value: dict[str, Any]) -> None:
        line = orjson.dumps(value, option=orjson.OPT_APPEND_NEWLINE)
        self._file.write(self._packer.compress(line))
        self.count += 1
        self.bytes += len(line)

    def __exit__(self, *_: object) -> None:
        self._file.write(self._packer.flush())
        self._file.close()


def hash_pair(text: str) -> tuple[int, int]:
    """128 bits of BLAKE2b over the UTF-8 bytes of `text`, as two numbers."""
    digest = blake2b(text.encode("utf-8"), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


def split_key(text_hash: tuple[int, int], seed: int) -> int:
    """64 bits that depend on the text and the seed alone: the held-out split is drawn by them."""
    data = b"".join(value.to_bytes(8, "little") for value in (*text_hash, seed))
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")
