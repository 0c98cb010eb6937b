"""Documents into token shards, in two passes and bounded memory.

The first pass encodes in reading order into one scratch file a source; the second copies the documents from there in
a seeded order. In memory: one batch of texts, one block of tokens, some integers a document. On disk: the tokens, and
those of one source twice.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from modicum.data.index import ShardsInfo, SourceInfo, offsets_file, source_folder, tokens_file, write_index
from modicum.data.order import Permutation, order_key
from modicum.store import UserError, atomic_directory, write_manifest, written_by_numpy

_BATCH_DOCUMENTS = 1024
_BATCH_CHARACTERS = 1_000_000
_BLOCK_TOKENS = 1 << 20


class TextDocument(Protocol):
    """What is read of a corpus document."""

    @property
    def id(self) -> str: ...
    @property
    def text(self) -> str: ...
    @property
    def source(self) -> str: ...


class Encoder(Protocol):
    """What is asked of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def bos_id(self) -> int: ...
    @property
    def eot_id(self) -> int: ...
    @property
    def pad_id(self) -> int: ...
    @property
    def hash(self) -> str: ...
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...


@dataclass
class _Scratch:
    """A source's documents in reading order: their tokens in a file, their lengths here."""

    path: Path
    file: BinaryIO
    lengths: "array[int]" = field(default_factory=lambda: array("Q"))
    bytes: int = 0
    max_id: int = 0


def write_shards(
    documents: Iterable[TextDocument], tokenizer: Encoder, out: Path, *, seed: int, tokens_per_shard: int = 1 << 28
) -> ShardsInfo:
    """Write `out`: per source the documents' tokens in a seeded order, their starts, index.json and manifest.json.

    A document is the token before a text + its ids + the end of text; where one token is both, the next document's
    ends this one. One more token before a text stands after the last document. Ids are uint16, or uint32 when the
    vocabulary is above 65,536; no file holds more than `tokens_per_shard` of them. `out` appears (or is replaced) only
    when it is whole. The result depends on the documents, their order, the tokenizer and the seed alone.
    """
    if tokens_per_shard < 1:
        raise ValueError(f"tokens_per_shard must be at least 1, not {tokens_per_shard}")
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    with atomic_directory(out) as folder:
        scratches = _encode(documents, tokenizer, folder, dtype)
        sources = {}
        for name, scratch in sorted(scratches.items()):
            order = order_key(seed, "documents", name)
            sources[name] = _shuffle(
                scratch, source_folder(folder, name), tokenizer.bos_id, order, tokens_per_shard, dtype
            )
            scratch.path.unlink()
        info = ShardsInfo(
            tokenizer_hash=tokenizer.hash,
            vocab_size=tokenizer.vocab_size,
            bos_id=tokenizer.bos_id,
            eot_id=tokenizer.eot_id,
            pad_id=tokenizer.pad_id,
            dtype=dtype.name,
            seed=seed,
            sources=sources,
        )
        write_index(folder, info)
        write_manifest(folder)
    return info


def _encode(
    documents: Iterable[TextDocument], tokenizer: Encoder, folder: Path, dtype: np.dtype[np.unsignedinteger]
) -> dict[str, _Scratch]:
    scratches: dict[str, _Scratch] = {}
    end = [] if tokenizer.bos_id == tokenizer.eot_id else [tokenizer.eot_id]
    try:
        for batch in _batches(documents):
            for document, ids in zip(batch, _encode_batch(tokenizer, batch), strict=True):
                tokens = np.array([tokenizer.bos_id, *ids, *end], np.int64)
                if tokens.min() < 0 or tokens.max() >= tokenizer.vocab_size:
                    raise ValueError(
                        f"document {document.id}: the tokenizer gave an id outside its {tokenizer.vocab_size} ids"
                    )
                if document.source not in scratches:
                    home = source_folder(folder, document.source)
                    home.mkdir(parents=True)
                    scratches[document.source] = _Scratch(home / "scratch", (home / "scratch").open("wb"))
                scratch = scratches[document.source]
                scratch.file.write(tokens.astype(dtype).tobytes())
                scratch.lengths.append(len(tokens))
                scratch.bytes += len(document.text.encode("utf-8"))
                scratch.max_id = max(scratch.max_id, int(tokens.max()))
    finally:
        for scratch in scratches.values():
            scratch.file.close()
    return scratches


def _batches(documents: Iterable[TextDocument]) -> Iterator[list[TextDocument]]:
    """Lists that hold enough documents to keep the tokenizer's threads busy, and not much more text than that."""
    batch: list[TextDocument] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if len(batch) >= _BATCH_DOCUMENTS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _encode_batch(tokenizer: Encoder, batch: list[TextDocument]) -> list[list[int]]:
    """The ids of each text. A text that the tokenizer refuses is reported with its document's name."""
    try:
        return tokenizer.encode_batch([document.text for document in batch])
    except UserError:
        for document in batch:
            try:
                tokenizer.encode_batch([document.text])
            except UserError as error:
                raise UserError(f"document {document.id} of source {document.source}: {error}") from error
        raise


def _shuffle(
    scratch: _Scratch,
    folder: Path,
    bos_id: int,
    order: int,
    tokens_per_shard: int,
    dtype: np.dtype[np.unsignedinteger],
) -> SourceInfo:
    """Copy the documents in the order's sequence into files of at most `tokens_per_shard` tokens."""
    lengths = np.array(scratch.lengths, np.uint64)
    total, count = int(lengths.sum()), len(lengths)
    places = Permutation(count, order)(np.arange(count))
    starts = np.concatenate([np.zeros(1, np.uint64), np.cumsum(lengths[places], dtype=np.uint64)])
    with written_by_numpy(offsets_file(folder)):
        np.save(offsets_file(folder), starts, allow_pickle=False)
    ends = np.cumsum(lengths, dtype=np.uint64)
    tokens = np.memmap(scratch.path, dtype=dtype, mode="r", shape=(total,))
    documents = (tokens[int(ends[i] - lengths[i]) : int(ends[i])] for i in places)
    files = _write_files(_blocks(documents, np.array([bos_id], dtype)), folder, tokens_per_shard)
    return SourceInfo(count, total, scratch.bytes, scratch.max_id, tuple(files))


def _blocks(
    documents: Iterable[NDArray[np.unsignedinteger]], last: NDArray[np.unsignedinteger]
) -> Iterator[NDArray[np.unsignedinteger]]:
    """The documents and then `last`, joined into blocks that are worth a write each."""
    parts: list[NDArray[np.unsignedinteger]] = []
    waiting = 0
    for document in documents:
        parts.append(document)
        waiting += len(document)
        if waiting >= _BLOCK_TOKENS:
            yield np.concatenate(parts)
            parts, waiting = [], 0
    yield np.concatenate([*parts, last])


def _write_files(blocks: Iterable[NDArray[np.unsignedinteger]], folder: Path, tokens_per_shard: int) -> list[int]:
    """Write the stream of blocks into numbered files; returns the tokens in each."""
    counts: list[int] = []
    file: BinaryIO | None = None
    try:
        for block in blocks:
            while len(block):
                if file is None or counts[-1] == tokens_per_shard:
                    if file is not None:
                        file.close()
                    file = tokens_file(folder, len(counts)).open("wb")
                    counts.append(0)
                part = block[: tokens_per_shard - counts[-1]]
                file.write(part.tobytes())
                counts[-1] += len(part)
                block = block[len(part) :]
    finally:
        if file is not None:
            file.close()
    return counts
