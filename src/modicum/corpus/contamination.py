"""Does a document contain the text of an evaluation item? Word n-grams, compared by hash.

Only questions that must stay unseen belong in here. A recall question asks for facts that the corpus is meant to
teach, so its text does not.
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from modicum.corpus.clean import clean
from modicum.corpus.words import Hashes, ngram_hashes, word_hashes

# A shorter phrase ("improper input validation") is ordinary language: it only counts when it is the whole document
MIN_PHRASE_WORDS = 5


class Contamination:
    """The n-grams of a set of texts. A text shorter than `n` words counts as one n-gram of its own length."""

    def __init__(self, grams: dict[int, Hashes], whole: dict[int, Hashes]) -> None:
        self._grams = grams
        self._whole = whole

    @classmethod
    def of(cls, texts: Iterable[str], n: int) -> "Contamination":
        """Index `texts` in n-grams of `n` words; n = 0 gives an index that finds nothing."""
        grams: dict[int, list[Hashes]] = {}
        whole: dict[int, list[Hashes]] = {}
        for text in texts if n else ():
            hashes, _ = word_hashes(clean(text))  # as the documents are
            length = min(n, len(hashes))
            if length:
                kept = grams if length >= min(n, MIN_PHRASE_WORDS) else whole
                kept.setdefault(length, []).append(ngram_hashes(hashes, length))
        return cls(*({k: np.unique(np.concatenate(v)) for k, v in part.items()} for part in (grams, whole)))

    def found_in(self, text: str) -> bool:
        """Whether `text` shares an n-gram with one of the indexed texts."""
        hashes, _ = word_hashes(text)
        if any(_overlap(ngram_hashes(hashes, n), known) for n, known in self._grams.items()):
            return True
        known = self._whole.get(len(hashes))
        return known is not None and _overlap(ngram_hashes(hashes, len(hashes)), known)

    def save(self, path: Path) -> None:
        """Write the index as a .npz of plain arrays."""
        arrays = {f"grams_{n}": v for n, v in self._grams.items()} | {f"whole_{n}": v for n, v in self._whole.items()}
        with path.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: Path) -> "Contamination":
        parts: dict[str, dict[int, Hashes]] = {"grams": {}, "whole": {}}
        with np.load(path, allow_pickle=False) as arrays:
            for name in arrays.files:
                part, n = name.split("_")
                parts[part][int(n)] = arrays[name]
        return cls(parts["grams"], parts["whole"])


def _overlap(grams: Hashes, known: Hashes) -> bool:
    """Whether any of `grams` is in the sorted array `known`."""
    places = np.searchsorted(known, grams)
    places[places == len(known)] = 0
    return bool((known[places] == grams).any())
