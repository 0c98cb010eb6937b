"""Text that repeats itself: lines, paragraphs and word sequences that come again and again.

Limits from table A1 of Rae et al. 2021 ("Scaling Language Models", Gopher). They were set for web pages of at least 50
words; a definition of 20 words that names its term twice is not spam, so shorter documents pass.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from modicum.corpus.words import ngram_hashes, word_hashes

MIN_WORDS = 50
_LINES, _LINE_CHARACTERS = 0.30, 0.20  # the same for paragraphs
_TOP = {2: 0.20, 3: 0.18, 4: 0.16}  # share of the characters that the most frequent n-gram makes up
_AGAIN = {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}  # share that lies in n-grams seen before


def repeats_itself(text: str) -> bool:
    """True when more of the text is repetition than any of Gopher's limits allows."""
    hashes, lengths = word_hashes(text)
    if len(hashes) < MIN_WORDS:
        return False
    if _repeated(text.split("\n")) or _repeated(text.split("\n\n")):
        return True
    total = int(lengths.sum())
    if any(_top_share(hashes, lengths, n) > limit * total for n, limit in _TOP.items()):
        return True
    for n, limit in _AGAIN.items():
        seen = _seen_before(ngram_hashes(hashes, n))
        if not seen.any():  # then no longer sequence comes twice either
            return False
        covered = np.zeros(len(hashes), bool)
        for k in range(n):
            covered[k : k + len(seen)] |= seen
        if lengths[covered].sum() > limit * total:
            return True
    return False


def _repeated(parts: Sequence[str]) -> bool:
    """Whether too many of the parts that are not blank, or too many of their characters, have come before."""
    parts = [part for part in map(str.strip, parts) if part]
    distinct = set(parts)
    characters, distinct_characters = sum(map(len, parts)), sum(map(len, distinct))
    return (
        len(parts) - len(distinct) > _LINES * len(parts)
        or characters - distinct_characters > _LINE_CHARACTERS * characters
    )


def _top_share(hashes: npt.NDArray[np.uint64], lengths: npt.NDArray[np.int64], n: int) -> int:
    """Characters of the n-gram that makes up most of the text, all its places together; 0 when none comes twice."""
    _, first, counts = np.unique(ngram_hashes(hashes, n), return_index=True, return_counts=True)
    ends = np.concatenate([[0], np.cumsum(lengths)])
    characters = (ends[first + n] - ends[first]) * counts
    return int(characters[counts > 1].max(initial=0))


def _seen_before(grams: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
    """For each n-gram, whether an equal one stands earlier."""
    seen = np.ones(len(grams), bool)
    seen[np.unique(grams, return_index=True)[1]] = False
    return seen
