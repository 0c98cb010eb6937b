"""Which documents stay: duplicates, the held-out split, and ids that are taken, decided for the whole corpus at once.

Always the document that comes first in the corpus stays, so the outcome is a function of the corpus alone. Tables lie
on disk; each pass takes as much of them into memory as the budget allows.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from modicum.corpus.chunks import Chunk, read_chunk_list
from modicum.corpus.near import candidate_pairs, signature_table, similar_pairs
from modicum.corpus.outcomes import EXACT_DUPLICATE, HELD_OUT, NEAR_DUPLICATE, TRAIN
from modicum.store import UserError

TAKEN = np.uint8(0x80)  # set in an outcome: the document's id is taken, it goes by id and place

Places = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]


def decide(
    work: Path, *, exact: bool, near: bool, similarity: float, heldout_fraction: float, memory_bytes: int
) -> None:
    """Write outcome.bin: one byte for each document of the corpus."""
    decision = Decision(work, memory_bytes)
    if not decision.total:
        return
    if exact:
        decision.drop_exact_duplicates()
    if near:
        decision.drop_near_duplicates(similarity)
    decision.hold_out(heldout_fraction)
    decision.make_ids_unique()
    decision.save()


def read_outcomes(work: Path, chunk: Chunk) -> npt.NDArray[np.uint8]:
    """The outcomes of one chunk's documents, shape (documents,)."""
    return np.fromfile(work / "outcome.bin", np.uint8, count=chunk.documents, offset=chunk.start)


def heldout_threshold(keys: Iterable[Keys], fraction: float) -> int:
    """The split key below which a document is held out: `fraction` of all keys, of evenly spread ones.

    Moved where it would hold out none or all of several different documents; one alone is not held out.
    """
    if not fraction:
        return 0
    lowest, highest = 2**64, 0
    for block in keys:
        if len(block):
            lowest, highest = min(lowest, int(block.min())), max(highest, int(block.max()))
    return min(max(int(fraction * 2**64), lowest + 1), highest)


class Decision:
    """The outcome of every document, in an array on disk that the passes write into."""

    def __init__(self, work: Path, memory_bytes: int) -> None:
        self._work = work
        self._chunks = read_chunk_list(work)
        self.total = sum(chunk.documents for chunk in self._chunks)
        self._memory = memory_bytes
        self._outcome = self._on_disk("outcome", np.dtype(np.uint8))

    def drop_exact_duplicates(self) -> None:
        """Of documents with equal text the first stays; a later one goes where its source has the filter on."""
        droppable = self._on_disk("exact", np.dtype(np.bool_))
        for place, key in self._equal_keys_together("text"):
            again = place[_come_again(place, key)]
            self._outcome[again[droppable[again]]] = EXACT_DUPLICATE

    def drop_near_duplicates(self, similarity: float) -> None:
        """A document goes when one that stays comes before it and is at least this similar.

        Similarity to a document that is itself dropped does not count, so likeness is not handed on along a chain.
        """
        signatures = signature_table(self._work, self._chunks, similarity)
        droppable = self._on_disk("near", np.dtype(np.bool_))
        links = sum(path.stat().st_size for path in (self._work / "pairs").glob("*.dups")) // 16
        passes = 1 + links * 9 * 32 // self._memory
        for part in range(passes):
            low, high = self.total * part // passes, self.total * (part + 1) // passes
            earlier, later = self._pairs(low, high)
            similar = similar_pairs(signatures, earlier, later, similarity)
            for i, j in zip(earlier[similar].tolist(), later[similar].tolist(), strict=True):
                if self._outcome[i] == TRAIN and self._outcome[j] == TRAIN and droppable[j]:
                    self._outcome[j] = NEAR_DUPLICATE

    def hold_out(self, fraction: float) -> None:
        """Hold out the documents that stay whose split key lies below the threshold."""
        threshold = heldout_threshold((keys for _, _, keys in self._split_keys()), fraction)
        for chunk, staying, keys in self._split_keys():
            self._outcome[chunk.start + staying[keys < np.uint64(threshold)]] = HELD_OUT

    def make_ids_unique(self) -> None:
        """Mark the documents that stay whose id an earlier one of their source has.

        Raises UserError when what they are called instead is taken too.
        """
        for place, key in self._equal_keys_together("id"):
            self._outcome[place[_come_again(place, key)]] |= TAKEN
        for place, key in self._equal_keys_together("id"):
            for again in place[_come_again(place, key)].tolist():
                source = max((chunk for chunk in self._chunks if chunk.start <= again), key=lambda c: c.start).source
                raise UserError(f"source {source}: ids of the form <id>~<file>#<line> come twice; give other ids")

    def save(self) -> None:
        """Bring the outcomes to disk, for readers on other machines too."""
        if isinstance(self._outcome, np.memmap):
            self._outcome.flush()

    def _records(self) -> Iterator[tuple[Chunk, npt.NDArray[Any]]]:
        for chunk in self._chunks:
            yield chunk, chunk.records(self._work)

    def _on_disk(self, field: str, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """One field of all records as an array that the system may write back to disk when memory is short."""
        path = self._work / f"{field}.bin"
        with path.open("wb") as file:
            for _, records in self._records():
                file.write(records[field].astype(dtype).tobytes())
        return np.memmap(path, dtype, mode="r+", shape=(self.total,)) if self.total else np.empty(0, dtype)

    def _pairs(self, low: int, high: int) -> tuple[Places, Places]:
        """The distinct pairs whose later document lies in [low, high), ordered by it and then by the earlier one."""
        found = [np.empty(0, np.int64)]
        for earlier, later in candidate_pairs(self._work, self._chunks):
            mine = (later >= low) & (later < high)
            found.append(later[mine] * self.total + earlier[mine])
        distinct = np.unique(np.concatenate(found))
        return distinct % self.total, distinct // self.total

    def _split_keys(self) -> Iterator[tuple[Chunk, Places, Keys]]:
        """For each chunk: the documents that stay, counted within it, and their split keys."""
        for chunk, records in self._records():
            staying = np.flatnonzero(self._outcome[chunk.start : chunk.start + chunk.documents] <= HELD_OUT)
            yield chunk, staying, records["split"][staying]

    def _equal_keys_together(self, field: str) -> Iterator[tuple[Places, Keys]]:
        """(place, key of 128 bits) of the documents that stay, in shares that fit the budget.

        An id's key is that of the name the document goes by, and differs between sources.
        """
        shares = 1 + self.total * 128 // self._memory
        names = sorted({chunk.source for chunk in self._chunks})
        for share in range(shares):
            places, keys = [np.empty(0, np.int64)], [np.empty((0, 2), np.uint64)]
            for chunk, records in self._records():
                outcome = np.asarray(self._outcome[chunk.start : chunk.start + chunk.documents])
                key = records[field].copy()
                if field == "id":
                    taken = (outcome & TAKEN) > 0
                    key[taken] = records["place"][taken]
                    key[:, 1] += np.uint64(names.index(chunk.source))
                mine = ((outcome & ~TAKEN) <= HELD_OUT) & (key[:, 0] % np.uint64(shares) == share)
                places.append(np.flatnonzero(mine) + chunk.start)
                keys.append(key[mine])
            yield np.concatenate(places), np.concatenate(keys)


def _come_again(place: Places, key: Keys) -> npt.NDArray[np.bool_]:
    """For each document, whether an equal key stands at an earlier place."""
    order = np.lexsort((place, key[:, 1], key[:, 0]))
    again = np.zeros(len(place), bool)
    again[order[1:]] = (key[order[1:]] == key[order[:-1]]).all(axis=1)
    return again
