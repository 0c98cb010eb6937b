"""Find the names of control tokens in a text: leftmost first, longest where several begin at one place.

The same choice as the tokenizers library makes among added tokens, and independent of how many there are.
"""

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Found(NamedTuple):
    start: int
    end: int
    literal: str


class Literals:
    def __init__(self, literals: Iterable[str]) -> None:
        self._all = frozenset(literals)
        self._lengths = sorted({len(literal) for literal in self._all}, reverse=True)
        first = sorted({literal[0] for literal in self._all})
        self._candidate = re.compile("[" + "".join(map(re.escape, first)) + "]")
        self._joined = "\0".join(self._all)
        self._beginnings = {literal[:n] for literal in self._all for n in range(1, len(literal))}
        self._endings = {literal[n:] for literal in self._all for n in range(1, len(literal))}

    def find(self, text: str) -> Iterator[Found]:
        """The literals in `text`, from left to right, none overlapping."""
        place = 0
        while (candidate := self._candidate.search(text, place)) is not None:
            start = candidate.start()
            place = start + 1
            for length in self._lengths:
                literal = text[start : start + length]  # at the end of the text, perhaps shorter than asked for
                if literal in self._all:
                    yield Found(start, place := start + len(literal), literal)
                    break

    def inside(self, text: str) -> bool:
        """Whether `text`, not empty, is a part of a literal (or the whole of one)."""
        return text != "" and "\0" not in text and text in self._joined

    def open_beginning(self, text: str) -> int:
        """How many of the first characters of `text` could end a literal that began before it."""
        longest = min(len(text), self._lengths[0] - 1)
        return next((n for n in range(longest, 0, -1) if text[:n] in self._endings), 0)

    def open_ending(self, text: str) -> int:
        """How many of the last characters of `text` could begin a literal that ends after it."""
        longest = min(len(text), self._lengths[0] - 1)
        return next((n for n in range(longest, 0, -1) if text[-n:] in self._beginnings), 0)
