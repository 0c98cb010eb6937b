"""Near duplicates: MinHash signatures in bands (Broder 1997; Leskovec et al., Mining of Massive Datasets, ch. 3).

Two documents that share a band are a candidate pair; the share of equal values in their whole signatures then
estimates their similarity, the Jaccard index of their sets of five consecutive words.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from datatrove.data import Document as PipelineDocument
from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupBuckets, MinhashDedupSignature
from datatrove.utils.hashing import HashConfig
from datatrove.utils.word_tokenizers import WordTokenizer

from modicum.corpus.chunks import Chunk
from modicum.corpus.words import Hashes, ngram_hashes, word_hashes, words

VALUES = 128  # of a signature, at most; the estimate's standard deviation is then at most 0.045
SHINGLE_WORDS = 5
_MISSED = 0.01  # at most this share of the pairs at exactly the wanted similarity shares no band
_BLOCK = 512  # shingles hashed at once: half a megabyte
_NEIGHBOURS = 8
_LINKS = 65_536  # pairs of neighbours read at once

Places = npt.NDArray[np.int64]
Signed = npt.NDArray[np.uint32]


def bands_for(similarity: float) -> tuple[int, int]:
    """(bands, values of a band): the longest bands that still find 99 % of the pairs of this similarity."""
    for rows in range(32, 1, -1):
        bands = VALUES // rows
        if (1 - similarity**rows) ** bands <= _MISSED:
            return bands, rows
    return VALUES, 1


def minhash_config(similarity: float) -> MinhashConfig:
    """datatrove's settings: 32-bit values, the same random numbers on every machine."""
    bands, rows = bands_for(similarity)
    hashing = HashConfig(precision=32, hash_fc="sha1")
    return MinhashConfig(SHINGLE_WORDS, bands, rows, seed=1, hash_config=hashing)


class PlainWords(WordTokenizer):  # type: ignore[misc]
    """Our words for datatrove, which would otherwise load a language package."""

    def word_tokenize(self, text: str) -> list[str]:
        return words(text)

    def sent_tokenize(self, text: str) -> list[str]:
        return text.split("\n")

    def span_tokenize(self, text: str) -> list[tuple[int, int]]:
        ends = np.cumsum([len(line) + 1 for line in self.sent_tokenize(text)]).tolist()
        return [(start, end - 1) for start, end in zip([0, *ends], ends, strict=False)]


class Signatures(MinhashDedupSignature):  # type: ignore[misc]
    """Sign the documents of a chunk: the bands go into datatrove's files, whole signatures into `<chunk>.sig`.

    A document without five words has a signature of zeros and no bands, so it is nobody's duplicate.
    """

    def __init__(self, work: Path, similarity: float) -> None:
        super().__init__(str(work / "bands"), minhash_config(similarity), language=PlainWords())
        self._folder = work / "signatures"
        multiply, self._add = self.parameters
        self._multiply = multiply | np.uint64(1)  # odd: no bit of the shingle is lost

    def sign(self, chunk: int, texts: Iterable[str]) -> None:
        """Write bands and signatures of one chunk; an empty text stands for a document that is already dropped."""
        self._folder.mkdir(exist_ok=True)
        with (self._folder / f"{chunk}.sig").open("wb") as self._table:
            self.run((PipelineDocument(text, "") for text in texts), chunk)

    def get_shingles(self, text: str) -> Hashes:
        shingles = ngram_hashes(word_hashes(text)[0], SHINGLE_WORDS)
        if not shingles.size:
            self._table.write(bytes(4 * self.num_hashes))
        return shingles.reshape(-1, 1)

    def get_signature(self, shingles: Hashes) -> list[list[int]]:
        """The lowest value of each multiply-and-shift hash over all shingles, in blocks: a long text has many."""
        lowest = np.full(self.num_hashes, 2**32 - 1, np.uint64)
        for start in range(0, len(shingles), _BLOCK):
            values = (shingles[start : start + _BLOCK] * self._multiply + self._add) >> np.uint64(32)
            np.minimum(lowest, values.min(axis=0), out=lowest)
        self._table.write(lowest.astype("<u4").tobytes())
        bands: list[list[int]] = lowest.reshape(self.config.num_buckets, -1).tolist()
        return bands


def shared_bands(work: Path, similarity: float) -> MinhashDedupBuckets:
    """The step, one task a band, that writes which documents share that band, as a chain of neighbours."""
    config = minhash_config(similarity)
    return MinhashDedupBuckets(str(work / "bands"), str(work / "pairs"), config=config, lines_to_buffer=256)


def signature_table(work: Path, chunks: Sequence[Chunk], similarity: float) -> Signed:
    """All signatures, shape (documents, values), joined into one file on disk."""
    bands, rows = bands_for(similarity)
    path = work / "signatures.bin"
    with path.open("wb") as file:
        for chunk in chunks:
            part = work / "signatures" / f"{chunk.number}.sig"
            with part.open("rb") as signed:
                while data := signed.read(2**20):
                    file.write(data)
            part.unlink()
    return np.memmap(path, "<u4", mode="r", shape=(sum(chunk.documents for chunk in chunks), bands * rows))


def similar_pairs(signatures: Signed, earlier: Places, later: Places, similarity: float) -> npt.NDArray[np.bool_]:
    """Whether each pair's signatures agree in at least this share of their values."""
    similar = np.empty(len(earlier), bool)
    for start in range(0, len(earlier), 4096):
        block = slice(start, start + 4096)
        similar[block] = (signatures[earlier[block]] == signatures[later[block]]).mean(axis=1) >= similarity
    return similar


def candidate_pairs(work: Path, chunks: Sequence[Chunk]) -> Iterator[tuple[Places, Places]]:
    """Blocks of (earlier, later) places of documents that share a band, some of them more than once.

    A run of documents that share one gives not all its pairs, which could be millions: each document is paired with
    the first of its run and with the eight before it.
    """
    starts = np.array([chunk.start for chunk in chunks], np.int64)
    numbers = np.array([chunk.number for chunk in chunks], np.int64)
    for path in sorted((work / "pairs").glob("*.dups")):
        first, tail = -1, np.empty(0, np.int64)  # of the run that the last block broke off
        with path.open("rb") as file:
            while data := file.read(16 * _LINKS):
                links = np.frombuffer(data, "<u4").reshape(-1, 4).astype(np.int64)
                left = starts[np.searchsorted(numbers, links[:, 0])] + links[:, 1]
                right = starts[np.searchsorted(numbers, links[:, 2])] + links[:, 3]
                heads, before, runs = _runs(left, right, first, tail)
                yield heads, right
                for distance in range(1, _NEIGHBOURS + 1):
                    later = np.arange(max(distance, len(tail)), len(before))
                    later = later[runs[later] == runs[later - distance]]
                    yield before[later - distance], before[later]
                first, tail = int(heads[-1]), before[runs == runs[-1]][-_NEIGHBOURS:]


def _runs(left: Places, right: Places, first: int, tail: Places) -> tuple[Places, Places, Places]:
    """left[k] and right[k] are neighbours in a run, which goes on where left[k] is right[k - 1].

    Returns the first document of each link's run; `tail` and `right` joined; and the run each of these belongs to.
    """
    begins = np.ones(len(left), bool)
    begins[0] = not len(tail) or left[0] != tail[-1]
    begins[1:] = left[1:] != right[:-1]
    run = np.cumsum(begins)
    heads = np.concatenate([[first], left[begins]])[run]
    return heads, np.concatenate([tail, right]), np.concatenate([np.zeros(len(tail), np.int64), run])
