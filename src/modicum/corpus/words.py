"""Words of a text and their hashes: what near duplicates, repetition and contamination are measured in.

A word is a run of letters, combining marks, numbers and underscores in lower case; in scripts that put no space between
words (Han, kana, Thai, Lao, Khmer, Burmese) each character counts as one. Hashes are the same on every machine.
"""

import re
from functools import lru_cache
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import regex  # type: ignore[import-untyped]

Hashes = npt.NDArray[np.uint64]

_UNSPACED = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
_ANY_WORD = regex.compile(rf"[{_UNSPACED}]|[\p{{L}}\p{{M}}\p{{N}}_--[{_UNSPACED}]]+", regex.V1)
# Latin, Greek and Cyrillic letters, punctuation and symbols: no unspaced script and no mark, which `re` takes for a gap
_NOT_PLAIN = re.compile("[^\u0000-\u02ff\u0370-\u0482\u048a-\u052f\u1e00-\u206f\u20a0-\u20cf\u2100-\u2bff]")
_PLAIN_WORD = re.compile(r"\w+")  # in plain text the same words, four times as fast
_WINDOW = 1_000_000  # characters; a long text is cut at white space, so that its list of words stays small
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd, so that no word is lost modulo 2^64


def words(text: str) -> list[str]:
    """The words of `text`, in order."""
    lower = text.lower()
    plain = lower.isascii() or _NOT_PLAIN.search(lower) is None
    return list((_PLAIN_WORD if plain else _ANY_WORD).findall(lower))


class _WordHash(dict[str, int]):
    """64-bit hash of a word, remembered; forgets all when it holds too many, which bounds it to about 30 MB."""

    def __missing__(self, word: str) -> int:
        if len(self) >= 200_000:
            self.clear()
        value = int.from_bytes(blake2b(word.encode("utf-8"), digest_size=8).digest(), "little")
        self[word] = value
        return value


_hash_of = _WordHash()


@lru_cache(maxsize=1)
def word_hashes(text: str) -> tuple[Hashes, npt.NDArray[np.int64]]:
    """(hash, length in characters) of every word of `text`, in order. Remembers the last text, since several steps of
    the pipeline ask for the same one in turn."""
    hashes, lengths = [], []
    start = 0
    while start < len(text):
        end = len(text)
        if end - start > _WINDOW:
            space = re.compile(r"\s").search(text, start + _WINDOW)
            end = space.start() if space else end
        found = words(text[start:end])
        hashes.append(np.fromiter(map(_hash_of.__getitem__, found), np.uint64, len(found)))
        lengths.append(np.fromiter(map(len, found), np.int64, len(found)))
        start = end
    empty = np.empty(0, np.uint64), np.empty(0, np.int64)
    return (np.concatenate(hashes), np.concatenate(lengths)) if hashes else empty


def ngram_hashes(hashes: Hashes, n: int) -> Hashes:
    """One hash for each run of `n` words: shape (words - n + 1,), empty when there are fewer than `n`."""
    count = max(len(hashes) - n + 1, 0)
    mixed = np.full(count, n, np.uint64)
    for k in range(n):
        mixed = mixed * _MULTIPLIER + hashes[k : k + count]
    mixed ^= mixed >> np.uint64(32)
    mixed *= _MULTIPLIER
    return mixed ^ (mixed >> np.uint64(29))
