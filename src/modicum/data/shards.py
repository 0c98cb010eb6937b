"""Token shards on disk, opened: memory maps read as one stream a source, and refused when they are not whole."""

from bisect import bisect_right
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from modicum.data.index import ShardsInfo, SourceInfo, mend, offsets_file, read_index, source_folder, tokens_file
from modicum.store import UserError, hash_file, hash_json
from modicum.store.manifest import MANIFEST, read_manifest


class SourceTokens:
    """One source's tokens over all its files; the one at place `tokens` stands after the last document."""

    def __init__(self, name: str, folder: Path, info: SourceInfo, dtype: np.dtype[np.unsignedinteger]) -> None:
        self.name = name
        self.folder = folder
        self.tokens = info.tokens
        self._files = [np.memmap(tokens_file(folder, i), dtype, mode="r") for i in range(len(info.files))]
        self._begins = [0, *accumulate(info.files)]
        # a plain array over the map: searching it must not copy it
        self._starts = np.asarray(np.load(offsets_file(folder), mmap_mode="r", allow_pickle=False))

    def read(self, begin: int, end: int) -> NDArray[np.unsignedinteger]:
        """The tokens begin..end-1, across the borders of files."""
        first = bisect_right(self._begins, begin) - 1
        parts = []
        for number in range(first, len(self._files)):
            offset = self._begins[number]
            if offset >= end:
                break
            parts.append(self._files[number][max(begin - offset, 0) : end - offset])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def document_starts(self, begin: int, end: int) -> NDArray[np.int64]:
        """Where documents start within begin..end-1."""
        low, high = np.searchsorted(self._starts, np.array([begin, end], np.uint64))
        return self._starts[low:high].astype(np.int64)


class Shards:
    """Opened shards: `info`, and `sources` by name. `fingerprint` changes with any byte of them."""

    def __init__(self, path: Path, info: ShardsInfo, fingerprint: str) -> None:
        self.path = path
        self.info = info
        self.fingerprint = fingerprint
        self.sources = {
            name: SourceTokens(name, source_folder(path, name), source, info.id_dtype)
            for name, source in sorted(info.sources.items())
        }

    def windows(self, sequence_length: int) -> dict[str, int]:
        """How many windows of `sequence_length` inputs each source fills, the last one perhaps in part."""
        return {name: -(-source.tokens // sequence_length) for name, source in self.sources.items()}


def open_shards(path: Path, *, tokenizer_hash: str, verify: bool = True) -> Shards:
    """Open what write_shards wrote.

    Raises UserError when the shards are of another tokenizer, when a file is missing, of the wrong size or (with
    `verify`, which reads every byte once) altered, or when they hold an id that the vocabulary does not have.
    """
    info = read_index(path)
    if info.tokenizer_hash != tokenizer_hash:
        raise UserError(
            f"{path}: written with another tokenizer (hash {info.tokenizer_hash[:12]}, this one has "
            f"{tokenizer_hash[:12]}); {mend(path)}"
        )
    for name, source in info.sources.items():
        if source.max_id >= info.vocab_size:
            raise UserError(
                f"{source_folder(path, name)}: holds the id {source.max_id}, beyond the vocabulary of "
                f"{info.vocab_size}; {mend(path)}"
            )
    hashes = _hashes(path, info)
    faults = _faults(path, info, hashes, verify=verify)
    if faults:
        raise UserError("\n".join([*faults, mend(path)]))
    return Shards(path, info, hash_json(hashes))


def _files(path: Path, info: ShardsInfo) -> dict[Path, int | None]:
    """Every file the shards are made of, with its size in bytes where the index knows it."""
    files: dict[Path, int | None] = {path / "index.json": None}
    for name, source in info.sources.items():
        folder = source_folder(path, name)
        files[offsets_file(folder)] = None
        for number, tokens in enumerate(source.files):
            files[tokens_file(folder, number)] = tokens * info.id_dtype.itemsize
    return files


def _hashes(path: Path, info: ShardsInfo) -> dict[str, str]:
    """The recorded SHA-256 of every file."""
    try:
        recorded = read_manifest(path)
        return {
            name: recorded[name] for name in sorted(file.relative_to(path).as_posix() for file in _files(path, info))
        }
    except (UserError, KeyError):
        raise UserError(f"{path / MANIFEST}: missing or damaged, so the shards are not whole; {mend(path)}") from None


def _faults(path: Path, info: ShardsInfo, hashes: dict[str, str], *, verify: bool) -> list[str]:
    """One line for each file that is not as it was written. The small files are hashed even without `verify`."""
    faults = []
    for file, size in _files(path, info).items():
        if not file.is_file():
            faults.append(f"{file}: missing")
        elif size is not None and file.stat().st_size != size:
            faults.append(f"{file}: {file.stat().st_size} bytes long instead of {size}, so it is truncated or altered")
        elif (verify or size is None) and hash_file(file) != hashes[file.relative_to(path).as_posix()]:
            faults.append(f"{file}: damaged (its SHA-256 is not the one in {MANIFEST})")
    return faults
