"""Bytes of tokens in, safe text out: whole characters only, and never a part of a stop string.

What could still become a stop string is held back until it cannot; so the same text comes out, whatever the borders
between tokens are. Matching is Knuth-Morris-Pratt, which knows after each character how much to hold.
"""

import codecs
from collections.abc import Sequence


class TextStream:
    """The text of one completion, given out as it becomes certain.

    The answer ends at the first character that completes a stop string; of several completed there, the longest is
    cut off. Bytes that are no UTF-8 become U+FFFD as `bytes.decode(errors="replace")` would have it.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._matchers = [_Matcher(pattern) for pattern in stop]
        self._held = ""
        self.stopped = False

    def feed(self, data: bytes) -> str:
        """Take the bytes of the next token; give the text that is now certain. Nothing after a stop string."""
        return self._take(self._decoder.decode(data))

    def finish(self) -> str:
        """Give what was held back; bytes of an unfinished character become one U+FFFD."""
        text = self._take(self._decoder.decode(b"", final=True))
        held, self._held = self._held, ""
        return text + held

    def _take(self, text: str) -> str:
        if self.stopped:
            return ""
        if not self._matchers:
            return text
        for position, character in enumerate(text):
            complete = [len(m.pattern) for m in self._matchers if m.step(character)]
            if complete:
                seen = self._held + text[: position + 1]
                self.stopped, self._held = True, ""
                return seen[: len(seen) - max(complete)]
        seen = self._held + text
        certain = len(seen) - max(m.matched for m in self._matchers)
        self._held = seen[certain:]
        return seen[:certain]


class _Matcher:
    """How many characters of `pattern` the text ends with: `matched`, always less than the whole."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.matched = 0
        self._fallback = [0] * len(pattern)
        for i in range(1, len(pattern)):
            self._fallback[i] = self._advance(self._fallback[i - 1], pattern[i])

    def step(self, character: str) -> bool:
        """Whether this character completes the pattern."""
        self.matched = self._advance(self.matched, character)
        return self.matched == len(self.pattern)

    def _advance(self, matched: int, character: str) -> int:
        while matched and self.pattern[matched] != character:
            matched = self._fallback[matched - 1]
        return matched + (self.pattern[matched] == character)
