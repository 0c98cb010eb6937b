"""How a runtime goes on where our decoder does, and how many bits it gives to a text."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import log
from typing import Any

import numpy as np

from modicum.evaluate.divergence import CLEAR
from modicum.exchange.parity import Ids, Speaker
from modicum.tokenizer import Tokenizer


@dataclass(frozen=True)
class Parted:
    """A greedy continuation that is another from `step` on: the tokens there, and by how much ours is ahead here."""

    continuation: int
    step: int
    ours: int
    theirs: int
    margin: float

    @property
    def near(self) -> bool:
        """Whether the two were as good as equal, so that rounding alone may have chosen."""
        return self.margin <= CLEAR


def parted(speak: Speaker, begun: Iterable[Ids], continued: Iterable[Sequence[int]]) -> list[Parted]:
    """Where our decoder, on the texts as they were continued, first takes another token than was taken."""
    found = []
    for number, (start, ids) in enumerate(zip(begun, continued, strict=True)):
        said = np.asarray(speak(np.array([*start, *ids], dtype=np.int64)))[len(start) - 1 : -1]
        step = next((step for step, token in enumerate(ids) if int(said[step].argmax()) != token), None)
        if step is not None:
            ours, theirs = int(said[step].argmax()), ids[step]
            found.append(Parted(number, step, ours, theirs, float(said[step, ours] - said[step, theirs])))
    return found


def bits_per_byte(tokenizer: Tokenizer, texts: Iterable[Ids], logits: Iterable[Any]) -> float:
    """Bits that logits (T, V) of each text give to its tokens but the first, a byte of what these write."""
    bits, size = 0.0, 0
    for ids, said in zip(texts, logits, strict=True):
        rows = np.asarray(said, dtype=np.float64)[:-1]
        top = rows.max(-1)
        chosen = rows[np.arange(len(rows)), ids[1:]] - top - np.log(np.exp(rows - top[:, None]).sum(-1))
        bits -= float(chosen.sum()) / log(2)
        size += sum(len(tokenizer.id_bytes(int(token))) for token in ids[1:])
    return bits / max(size, 1)
