"""What an ONNX model is asked, and where the answers lie: prompts alone, in pieces with a cache, in padded batches."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from modicum.exchange.onnx_runtime import Run
from modicum.exchange.parity import Ids, Truth

TOGETHER = 64  # tokens of a prompt that goes into a batch
Logits = NDArray[np.float32]


class Prompts:
    """What is asked, in order: each prompt alone; a prompt in pieces; the short ones in a batch padded on the left, and
    on the right; one prompt with another end; texts that judge."""

    def __init__(self, truth: Truth, texts: Sequence[Ids], vocabulary: int) -> None:
        self.prompts = truth.prompts
        self.short = [number for number, prompt in enumerate(truth.prompts) if len(prompt) <= TOGETHER]
        self.pieces = self.short[-1]
        longest = truth.prompts[self.pieces]
        self.cuts = tuple(place for place in (1, 3, 4, 17) if place < len(longest))
        other = longest.copy()
        other[-1] = (other[-1] + 1) % vocabulary
        self._last = len(longest) - 1
        self._count = len(texts)
        parts = (self._padded(left=True, vocabulary=vocabulary), self._padded(left=False, vocabulary=vocabulary))
        self.all = [
            *map(Run.alone, truth.prompts),
            Run.alone(longest, self.cuts),
            *parts,
            Run.alone(other),
            *map(Run.alone, texts),
        ]

    def _padded(self, *, left: bool, vocabulary: int) -> Run:
        """Padding is of random tokens, so that it shows where it is seen."""
        width = max(len(self.prompts[number]) for number in self.short)
        ids = np.random.default_rng(2).integers(0, vocabulary, (len(self.short), width), dtype=np.int64)
        mask = np.zeros_like(ids)
        for row, number in enumerate(self.short):
            place = self._place(number, width, left=left)
            ids[row, place], mask[row, place] = self.prompts[number], 1
        return Run(ids, mask)

    def _place(self, number: int, width: int, *, left: bool) -> slice:
        length = len(self.prompts[number])
        return slice(width - length, width) if left else slice(0, length)

    def alone(self, logits: Sequence[Logits]) -> list[Logits]:
        return [said[0] for said in logits[: len(self.prompts)]]

    def texts(self, logits: Sequence[Logits]) -> list[Logits]:
        return [said[0] for said in logits[len(logits) - self._count :]]

    def in_pieces(self, logits: Sequence[Logits]) -> Logits:
        said: Logits = logits[len(self.prompts)][0]
        return said

    def otherwise(self, logits: Sequence[Logits]) -> list[tuple[str, int, Ids, Logits]]:
        """How each prompt was given, its number, its ids and logits, for those not alone."""
        found = [("with a cache", self.pieces, self.prompts[self.pieces], self.in_pieces(logits))]
        for left, batch in ((True, logits[len(self.prompts) + 1]), (False, logits[len(self.prompts) + 2])):
            for row, number in enumerate(self.short):
                place = self._place(number, batch.shape[1], left=left)
                how = f"in a batch padded on the {'left' if left else 'right'}"
                found.append((how, number, self.prompts[number], batch[row, place]))
        return found

    def moved_before(self, logits: Sequence[Logits]) -> tuple[float, float]:
        """By how much another last token changes what is said before it, and the largest logit."""
        said, other = logits[self.pieces][0], logits[len(self.prompts) + 3][0]
        off = float(np.abs(said[: self._last] - other[: self._last]).max(initial=0))
        return off, float(np.abs(said).max())
