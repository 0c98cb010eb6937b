"""How a runtime goes on where our decoder does."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from modicum.exchange.parity import Ids, Speaker


@dataclass(frozen=True)
class Parted:
    """A greedy continuation that is another from `step` on: the tokens there, and by how much ours is ahead here; near:
    the two were as good as equal, so that rounding alone may have chosen."""

    continuation: int
    step: int
    ours: int
    theirs: int
    margin: float
    near: bool


def parted(
    speak: Speaker, begun: Iterable[Ids], continued: Iterable[Sequence[int]], *, clear: float
) -> tuple[Parted, ...]:
    """Where our decoder, on the texts as they were continued, first takes another token than was taken.

    clear: by how much of a logit it must be ahead to be no near tie.
    """
    found = []
    for number, (start, ids) in enumerate(zip(begun, continued, strict=True)):
        said = np.asarray(speak(np.array([*start, *ids], dtype=np.int64)))[len(start) - 1 : -1]
        step = next((step for step, token in enumerate(ids) if int(said[step].argmax()) != token), None)
        if step is not None:
            ours, theirs = int(said[step].argmax()), ids[step]
            margin = float(said[step, ours] - said[step, theirs])
            found.append(Parted(number, step, ours, theirs, margin, margin <= clear))
    return tuple(found)
