"""Token shards on disk, opened: memory maps read as one stream a source, and refused when they are not whole."""

from bisect import bisect_right
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from modicum.data.index import MEND, ShardsInfo, SourceInfo, offsets_file, read_index, source_folder, tokens_file
from modicum.store import UserError, hash_file, hash_json
from modicum.store.manifest import read_manifest


class SourceTokens:
    """One source's tokens over all its files; the one at place `tokens` is the end-of-text after the last document."""

    def __init__(self, name: str, folder: Path, info: SourceInfo, dtype: np.dtype[np.unsignedinteger]) -> None:
        self.name = name
        self.folder = folder
        self.tokens = info.tokens
        self._files = [_map_tokens(tokens_file(folder, i), count, dtype) for i, count in enumerate(info.files)]
        self._begins = [0, *accumulate(info.files)]
        self._starts = _map_offsets(offsets_file(folder), info)

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

    def check_starts(self) -> None:
        """Raise UserError unless every document holds at least one token and follows the one before."""
        if np.any(self._starts[1:] <= self._starts[:-1]):
            raise UserError(f"{offsets_file(self.folder)}: damaged, its document starts do not rise; {MEND}")


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


def open_shards(path: Path, *, tokenizer_hash: str, vocab_size: int | None = None, verify: bool = True) -> Shards:
    """Open what write_shards wrote.

    Raises UserError when the shards are of another tokenizer, when a file is missing, of the wrong size or (with
    `verify`, which reads every byte once) altered, or when they hold an id that the vocabulary, or an embedding of
    `vocab_size` rows, does not have.
    """
    info = read_index(path)
    if info.tokenizer_hash != tokenizer_hash:
        raise UserError(
            f"{path}: written with another tokenizer (hash {info.tokenizer_hash[:12]}, this one has "
            f"{tokenizer_hash[:12]}); {MEND}"
        )
    rows = info.vocab_size if vocab_size is None else min(vocab_size, info.vocab_size)
    for name, source in info.sources.items():
        if source.max_id >= rows:
            raise UserError(
                f"{source_folder(path, name)}: holds the id {source.max_id}, and there are only {rows} embedding rows; "
                f"make model.vocab_size at least {source.max_id + 1}, or {MEND}"
            )
    hashes = read_manifest(path)
    shards = Shards(path, info, hash_json(hashes))
    if verify:
        _verify(path, hashes)
        for source_tokens in shards.sources.values():
            source_tokens.check_starts()
    return shards


def _verify(path: Path, hashes: dict[str, str]) -> None:
    expected = {
        file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file() and file.name != "manifest.json"
    }
    faults = [f"{path / name}: not in the manifest" for name in sorted(expected - set(hashes))]
    faults += [f"{path / name}: missing" for name in sorted(set(hashes) - expected)]
    faults += [
        f"{path / name}: damaged (its SHA-256 is not the one in manifest.json)"
        for name in sorted(expected & set(hashes))
        if hash_file(path / name) != hashes[name]
    ]
    if faults:
        raise UserError("\n".join([*faults, MEND]))


def _map_tokens(path: Path, count: int, dtype: np.dtype[np.unsignedinteger]) -> NDArray[np.unsignedinteger]:
    expected = count * dtype.itemsize
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise UserError(f"{path}: missing; {MEND}") from None
    if size != expected:
        raise UserError(f"{path}: {size} bytes long instead of {expected}, so it is truncated or altered; {MEND}")
    return np.memmap(path, dtype=dtype, mode="r", shape=(count,))


def _map_offsets(path: Path, info: SourceInfo) -> NDArray[np.uint64]:
    try:
        starts = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise UserError(f"{path}: missing; {MEND}") from None
    except (ValueError, EOFError, OSError) as error:
        raise UserError(f"{path}: truncated or damaged ({error}); {MEND}") from error
    whole = starts.dtype == np.uint64 and starts.shape == (info.documents + 1,)
    if not whole or starts[0] != 0 or starts[-1] != info.tokens:
        raise UserError(f"{path}: damaged, not the starts of {info.documents} documents; {MEND}")
    return np.asarray(starts)
