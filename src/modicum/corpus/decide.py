"""Which documents stay: duplicates, the held-out split, and ids that are taken, decided for the whole corpus at once.

Always the document that comes first in the corpus stays, so the outcome is a function of the corpus alone. Tables lie
on disk; each pass takes a share of them into memory that fits the budget.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from modicum.corpus.chunks import RECORD, Chunk, read_chunk_list
from modicum.corpus.near import candidate_pairs, signature_width
from modicum.corpus.outcomes import EXACT_DUPLICATE, HELD_OUT, NEAR_DUPLICATE, TRAIN
from modicum.store import UserError

TAKEN = np.uint8(0x80)  # set in an outcome: the id is taken, the document goes by its place

Places = npt.NDArray[np.int64]


class Decisions:
    """The outcome of every document, in an array on disk that the passes share."""

    def __init__(self, work: Path, memory_bytes: int) -> None:
        self.work = work
        self.chunks = read_chunk_list(work)
        self.total = sum(chunk.documents for chunk in self.chunks)
        self._memory = memory_bytes
        self.outcome = self._outcomes()

    def _outcomes(self) -> npt.NDArray[np.uint8]:
        path = self.work / "outcome.bin"
        with path.open("wb") as file:
            for _, records in self._records():
                file.write(records["outcome"].tobytes())
        return np.memmap(path, np.uint8, mode="r+", shape=(self.total,)) if self.total else np.empty(0, np.uint8)

    def _records(self) -> Iterator[tuple[Chunk, npt.NDArray[Any]]]:
        for chunk in self.chunks:
            yield chunk, chunk.records(self.work)

    def drop_exact_duplicates(self) -> None:
        """Of documents with equal text, the first stays; a later one goes where its source's filter is on."""
        for place, key, droppable in self._hash_groups("text", "exact"):
            later = _comes_again(key, place) & droppable
            self.outcome[place[later]] = EXACT_DUPLICATE

    def drop_near_duplicates(self, similarity: float) -> None:
        """A document goes when one that stays comes before it and is at least this similar.

        Similarity to a document that is itself dropped does not count, so likeness is not handed on along a chain.
        """
        signatures = self._signatures(similarity)
        droppable = self._flags("near")
        starts = np.array([chunk.start for chunk in self.chunks], np.int64)
        numbers = np.array([chunk.number for chunk in self.chunks], np.int64)
        links = sum(path.stat().st_size for path in (self.work / "pairs").glob("*.dups")) // 16
        passes = 1 + links * 9 * 48 // self._memory
        for low, high in _ranges(self.total, passes):
            earlier, later = _within(candidate_pairs(self.work, starts, numbers), low, high)
            similar = _similar(signatures, earlier, later, similarity)
            for i, j in zip(earlier[similar].tolist(), later[similar].tolist(), strict=True):
                if self.outcome[i] == TRAIN and self.outcome[j] == TRAIN and droppable[j]:
                    self.outcome[j] = NEAR_DUPLICATE

    def hold_out(self, fraction: float) -> None:
        """Hold out the documents whose split key lies in the lowest `fraction` of all keys.

        Of two or more documents at least one is held out and at least one is not; a single one is trained on.
        """
        if not fraction:
            return
        kept = 0
        lowest, highest = (2**64, -1), (-1, -1)  # (key, place)
        held_out = 0
        for chunk, records in self._records():
            part = self.outcome[chunk.start : chunk.start + chunk.documents]
            staying = np.flatnonzero(part == TRAIN)
            keys = records["split"][staying]
            chosen = keys < np.uint64(int(fraction * 2**64))
            part[staying[chosen]] = HELD_OUT
            kept, held_out = kept + len(staying), held_out + int(chosen.sum())
            if len(keys):
                lowest = min(lowest, (int(keys.min()), chunk.start + int(staying[keys.argmin()])))
                highest = max(highest, (int(keys.max()), chunk.start + int(staying[keys.argmax()])))
        if kept >= 2 and held_out == 0:
            self.outcome[lowest[1]] = HELD_OUT
        elif kept and held_out == kept:
            self.outcome[highest[1]] = TRAIN

    def make_ids_unique(self) -> None:
        """Mark the documents that stay whose id an earlier one of the same source has: they go by id and place.

        Raises UserError when such an id is taken too.
        """
        for place, key, _ in self._hash_groups("id", "exact", by_source=True):
            self.outcome[place[_comes_again(key, place)]] |= TAKEN
        for place, key, _ in self._hash_groups("id", "exact", by_source=True):
            if _comes_again(key, place).any():
                again = int(place[_comes_again(key, place)][0])
                source = next(c.source for c in reversed(self.chunks) if c.start <= again)
                raise UserError(
                    f"source {source}: ids of the form <id>~<file>#<line> come twice; give each document its own"
                )

    def _flags(self, name: str) -> npt.NDArray[np.bool_]:
        path = self.work / f"{name}.bin"
        with path.open("wb") as file:
            for _, records in self._records():
                file.write(records[name].tobytes())
        return np.memmap(path, np.bool_, mode="r", shape=(self.total,))

    def _signatures(self, similarity: float) -> npt.NDArray[np.uint32]:
        path, width = self.work / "signatures.bin", signature_width(similarity)
        with path.open("wb") as file:
            for chunk in self.chunks:
                part = self.work / "signatures" / f"{chunk.number}.sig"
                with part.open("rb") as source:
                    while data := source.read(2**20):
                        file.write(data)
                part.unlink()
        return np.memmap(path, np.uint32, mode="r", shape=(self.total, width))

    def _hash_groups(
        self, field: str, flag: str, *, by_source: bool = False
    ) -> Iterator[tuple[Places, npt.NDArray[np.uint64], npt.NDArray[np.bool_]]]:
        """(place, 128-bit key, flag) of the documents that stay, in shares that hold equal keys together."""
        shares = 1 + self.total * 128 // self._memory
        names = sorted({chunk.source for chunk in self.chunks})
        for share in range(shares):
            places, keys, flags = [], [], []
            for chunk, records in self._records():
                part = self.outcome[chunk.start : chunk.start + chunk.documents]
                key = records[field].copy()
                if field == "id":
                    renamed = (part & TAKEN) > 0
                    key[renamed] = records["place"][renamed]
                if by_source:
                    key[:, 1] ^= np.uint64(names.index(chunk.source) * 0x9E3779B97F4A7C15 % 2**64)
                mine = ((part & ~TAKEN) <= HELD_OUT) & (key[:, 0] % np.uint64(shares) == share)
                places.append(np.flatnonzero(mine) + chunk.start)
                keys.append(key[mine])
                flags.append(records[flag][mine])
            yield np.concatenate(places), np.concatenate(keys), np.concatenate(flags)


def _comes_again(key: npt.NDArray[np.uint64], place: Places) -> npt.NDArray[np.bool_]:
    """For each document, whether an equal key stands at an earlier place."""
    order = np.lexsort((place, key[:, 1], key[:, 0]))
    again = np.zeros(len(place), bool)
    ordered = key[order]
    again[order[1:]] = (ordered[1:] == ordered[:-1]).all(axis=1)
    return again


def _ranges(total: int, parts: int) -> Iterator[tuple[int, int]]:
    for part in range(parts):
        yield total * part // parts, total * (part + 1) // parts


def _within(pairs: Iterator[tuple[Places, Places]], low: int, high: int) -> tuple[Places, Places]:
    """The distinct pairs whose later document lies in [low, high), ordered by it and then by the earlier one."""
    found = [np.empty((0, 2), np.int64)]
    for earlier, later in pairs:
        mine = (later >= low) & (later < high)
        found.append(np.stack([later[mine], earlier[mine]], axis=1))
    distinct = np.unique(np.concatenate(found), axis=0)
    return distinct[:, 1], distinct[:, 0]


def _similar(
    signatures: npt.NDArray[np.uint32], earlier: Places, later: Places, similarity: float
) -> npt.NDArray[np.bool_]:
    """Whether each pair's signatures agree in at least this share of their values."""
    similar = np.empty(len(earlier), bool)
    for start in range(0, len(earlier), 4096):
        block = slice(start, start + 4096)
        agree = (signatures[earlier[block]] == signatures[later[block]]).mean(axis=1)
        similar[block] = agree >= similarity
    return similar


def decide(
    work: Path, *, exact: bool, near: bool, similarity: float, heldout_fraction: float, memory_bytes: int
) -> None:
    """Write outcome.bin: one byte for each document of the corpus."""
    decisions = Decisions(work, memory_bytes)
    steps: list[Callable[[], None]] = [
        *([decisions.drop_exact_duplicates] if exact else []),
        *([lambda: decisions.drop_near_duplicates(similarity)] if near else []),
        lambda: decisions.hold_out(heldout_fraction),
        decisions.make_ids_unique,
    ]
    for step in steps:
        step()
    if isinstance(decisions.outcome, np.memmap):
        decisions.outcome.flush()


def read_outcomes(work: Path, chunk: Chunk) -> npt.NDArray[np.uint8]:
    return np.fromfile(work / "outcome.bin", np.uint8, count=chunk.documents, offset=chunk.start)


assert RECORD.itemsize == 59
