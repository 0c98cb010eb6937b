"""Near duplicates: MinHash signatures in bands (Broder 1997; Leskovec et al., Mining of Massive Datasets, ch. 3).

Two documents that share a band become a candidate pair; the share of equal values in their whole signatures then
estimates their similarity, the Jaccard index of their runs of five words.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from datatrove.data import Document as PipelineDocument
from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupBuckets, MinhashDedupSignature
from datatrove.utils.hashing import HashConfig
from datatrove.utils.word_tokenizers import WordTokenizer

from modicum.corpus.words import ngram_hashes, word_hashes, words

VALUES = 128  # of a signature; the estimate's standard deviation is at most 0.045
SHINGLE_WORDS = 5
_MISSED = 0.01  # at most this share of pairs at exactly the wanted similarity shares no band
_BLOCK = 512  # shingles hashed at once: half a megabyte


def bands_for(similarity: float) -> tuple[int, int]:
    """(bands, values of a band): the longest bands that still find 99 % of the pairs of this similarity."""
    for rows in range(VALUES, 1, -1):
        bands = VALUES // rows
        if (1 - similarity**rows) ** bands <= _MISSED:
            return bands, rows
    return VALUES, 1


class PlainWords(WordTokenizer):  # type: ignore[misc]
    """Our words for datatrove, which would otherwise load a language package."""

    def word_tokenize(self, text: str) -> list[str]:
        return words(text)

    def sent_tokenize(self, text: str) -> list[str]:
        return text.split("\n")

    def span_tokenize(self, text: str) -> list[tuple[int, int]]:
        spans, start = [], 0
        for line in self.sent_tokenize(text):
            spans.append((start, start + len(line)))
            start += len(line) + 1
        return spans


def minhash_config(similarity: float) -> MinhashConfig:
    bands, rows = bands_for(similarity)
    return MinhashConfig(
        n_grams=SHINGLE_WORDS,
        num_buckets=bands,
        hashes_per_bucket=rows,
        seed=1,
        hash_config=HashConfig(precision=32, hash_fc="sha1"),
    )


class Signatures(MinhashDedupSignature):  # type: ignore[misc]
    """Sign the documents of a chunk: the bands go into datatrove's files, whole signatures into `<chunk>.sig`.

    A document without a run of five words has a signature of zeros and no bands, so it is nobody's duplicate.
    """

    name = "MinHash signatures"

    def __init__(self, work: Path, similarity: float) -> None:
        super().__init__(str(work / "bands"), minhash_config(similarity), language=PlainWords())
        self.work = work
        self.width = self.num_hashes
        multiply, add = self.parameters
        self._multiply, self._add = multiply | np.uint64(1), add

    def sign(self, chunk: int, texts: Iterable[str]) -> None:
        """Write bands and signatures of one chunk; an empty text stands for a document that is already dropped."""
        folder = self.work / "signatures"
        folder.mkdir(exist_ok=True)
        with (folder / f"{chunk}.sig").open("wb") as self._table:
            MinhashDedupSignature.run(self, (PipelineDocument(text, "") for text in texts), chunk)

    def get_shingles(self, text: str) -> npt.NDArray[np.uint64]:
        shingles = ngram_hashes(word_hashes(text)[0], SHINGLE_WORDS)
        if not shingles.size:
            self._table.write(bytes(4 * self.width))
        return shingles.reshape(-1, 1)

    def get_signature(self, shingles: npt.NDArray[np.uint64]) -> list[list[int]]:
        lowest = np.full(self.width, 2**32 - 1, np.uint64)
        for start in range(0, len(shingles), _BLOCK):
            block = shingles[start : start + _BLOCK] * self._multiply + self._add
            np.minimum(lowest, (block >> np.uint64(32)).min(axis=0), out=lowest)
        self._table.write(lowest.astype("<u4").tobytes())
        return [band.tolist() for band in np.split(lowest, self.config.num_buckets)]


def candidate_steps(work: Path, similarity: float) -> list[MinhashDedupBuckets]:
    """The step that merges the bands of all chunks and writes which documents share one; a task for each band."""
    return [
        MinhashDedupBuckets(
            str(work / "bands"), str(work / "pairs"), config=minhash_config(similarity), lines_to_buffer=256
        )
    ]


def signature_width(similarity: float) -> int:
    bands, rows = bands_for(similarity)
    return bands * rows


def candidate_pairs(
    work: Path, starts: npt.NDArray[np.int64], numbers: npt.NDArray[np.int64]
) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Blocks of (earlier, later) places of documents that share a band.

    `starts` and `numbers` are the chunks' first places and numbers. The files list each band's runs of equal
    documents as a chain of neighbours; each document is paired with the first of its run and with the eight before it.
    """
    for path in sorted((work / "pairs").glob("*.dups")):
        carried = np.empty(0, np.int64)  # the end of the run that the last block broke off
        first = -1
        with path.open("rb") as file:
            while data := file.read(16 * 65_536):
                links = np.frombuffer(data, "<u4").reshape(-1, 4).astype(np.int64)
                left = starts[np.searchsorted(numbers, links[:, 0])] + links[:, 1]
                right = starts[np.searchsorted(numbers, links[:, 2])] + links[:, 3]
                yield from _pairs_of_block(left, right, carried, first)
                breaks = np.flatnonzero(left[1:] != right[:-1]) + 1
                if len(breaks):
                    first = int(left[breaks[-1]])
                    carried = right[breaks[-1] :][-_NEIGHBOURS:]
                elif len(carried) and left[0] == carried[-1]:
                    carried = np.concatenate([carried, right])[-_NEIGHBOURS:]
                else:
                    first = int(left[0])
                    carried = right[-_NEIGHBOURS:]


_NEIGHBOURS = 8


def _pairs_of_block(
    left: npt.NDArray[np.int64], right: npt.NDArray[np.int64], carried: npt.NDArray[np.int64], first: int
) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """left[k], right[k] are neighbours; where left[k] is right[k - 1], the run goes on."""
    goes_on = np.empty(len(left), bool)
    goes_on[0] = len(carried) > 0 and left[0] == carried[-1]
    goes_on[1:] = left[1:] == right[:-1]
    begins = np.flatnonzero(~goes_on)
    run = np.cumsum(~goes_on)  # 0: the carried run
    heads = np.concatenate([[first], left[begins]])
    yield heads[run], right
    before = np.concatenate([carried, right])
    runs = np.concatenate([np.zeros(len(carried), np.int64), run])
    for distance in range(1, _NEIGHBOURS + 1):
        if len(before) <= distance:
            break
        later = np.arange(max(distance, len(carried)), len(before))
        same = runs[later] == runs[later - distance]
        yield before[later[same] - distance], before[later[same]]
