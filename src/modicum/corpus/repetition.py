"""Text that repeats itself: lines, paragraphs and word sequences that come again and again.

Twice the limits of table A1 in Rae et al. 2021 ("Scaling Language Models", Gopher), and only from 100 words on. The
table is for web pages: of 170 MB of manuals and security references it took 6 % of the documents and 9 % of the text
(lists of commands, techniques with their test scripts), twice its limits 1.5 % and 2 %. Texts of one sentence break it
by naming their subject three times. What a loop or a copying accident makes lies far above either.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from modicum.corpus.words import Hashes, ngram_hashes, word_hashes

MIN_WORDS = 100
_PARTS, _PART_CHARACTERS = 0.60, 0.40  # of lines, and of paragraphs
_TOP = {2: 0.40, 3: 0.36, 4: 0.32}  # share of the text that its most frequent n-gram makes up
_AGAIN = {5: 0.30, 6: 0.28, 7: 0.26, 8: 0.24, 9: 0.22, 10: 0.20}  # share that lies in n-grams seen before


def repeats_itself(text: str) -> bool:
    """True when more of the text's characters (or parts) are repetition than any one of the limits allows."""
    hashes, lengths = word_hashes(text)
    if len(hashes) < MIN_WORDS:
        return False
    if _parts_come_again(text.split("\n")) or _parts_come_again(text.split("\n\n")):
        return True
    if any(_top_characters(hashes, lengths, n) > limit * len(text) for n, limit in _TOP.items()):
        return True
    for n, limit in _AGAIN.items():
        grams = ngram_hashes(hashes, n)
        if not _any_twice(grams):
            return False  # then no longer sequence comes twice either
        seen = _seen_before(grams)
        covered = np.zeros(len(hashes), bool)
        for k in range(n):
            covered[k : k + len(seen)] |= seen
        if lengths[covered].sum() > limit * len(text):
            return True
    return False


def _parts_come_again(parts: Sequence[str]) -> bool:
    """Whether too many of the parts that are not blank, or too many of their characters, have come before."""
    parts = [part for part in map(str.strip, parts) if part]
    distinct = set(parts)
    characters, distinct_characters = sum(map(len, parts)), sum(map(len, distinct))
    return (
        len(parts) - len(distinct) > _PARTS * len(parts)
        or characters - distinct_characters > _PART_CHARACTERS * characters
    )


def _top_characters(hashes: Hashes, lengths: npt.NDArray[np.int64], n: int) -> int:
    """Characters of the most frequent n-gram, all its places together; 0 when none comes twice."""
    grams = ngram_hashes(hashes, n)
    ordered = np.sort(grams)
    begins = np.concatenate([[0], np.flatnonzero(ordered[1:] != ordered[:-1]) + 1, [len(ordered)]])
    counts = np.diff(begins)
    most = int(counts.argmax())
    if counts[most] == 1:
        return 0
    place = int(np.flatnonzero(grams == ordered[begins[most]])[0])
    return int(lengths[place : place + n].sum() * counts[most])


def _any_twice(grams: Hashes) -> bool:
    ordered = np.sort(grams)
    return bool((ordered[1:] == ordered[:-1]).any())


def _seen_before(grams: Hashes) -> npt.NDArray[np.bool_]:
    """For each n-gram, whether an equal one stands earlier."""
    seen = np.ones(len(grams), bool)
    seen[np.unique(grams, return_index=True)[1]] = False
    return seen
