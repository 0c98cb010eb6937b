"""A rounded or converted model beside full precision: what it says of the same texts, and what it costs to run."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import log
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from modicum.evaluate.divergence import CLEAR, Quality, quality
from modicum.evaluate.texts import Texts
from modicum.store import UserError, free_memory
from modicum.tokenizer import Tokenizer


@dataclass(frozen=True)
class Cost:
    """Bytes of the weights' files, seconds to load them, tokens a second of one greedy answer, the second, when all is
    warm, and bytes of memory that loading and answering took."""

    disk_bytes: int
    load_seconds: float
    tokens_per_second: float
    memory_bytes: int


def cost_of_full(measure: Callable[[], Cost]) -> tuple[Cost | None, tuple[str, ...]]:
    """What float32 costs; None, and the reason, where it does not fit here: what is proven is not lost by it."""
    try:
        return measure(), ()
    except (OSError, UserError) as error:
        return None, (f"what float32 costs was not measured: {error}",)


def check_free(needed: int) -> None:
    """UserError where so many bytes of memory are not free: a system that runs out of it ends us without a word."""
    free = free_memory()
    if needed > free:
        raise UserError(f"it takes about {needed / 1e9:.2f} GB of memory, and {free / 1e9:.2f} GB are free")


@dataclass(frozen=True)
class Judged:
    """So many texts, whose (in words); how far what was said of them is from full precision, and the bits per byte that
    full precision and it give to them."""

    texts: int
    source: str
    quality: Quality
    full_bits_per_byte: float
    bits_per_byte: float


def judged(
    texts: Texts, tokenizer: Tokenizer, full: Iterable[Any], found: Iterable[Any], *, clear: float = CLEAR
) -> Judged:
    """Compare logits (T, V), NumPy's or torch's, of each text: `full` precision's, and what was `found`.

    One text at a time. clear: by how much of a logit a first choice must be ahead to be held to it.
    """
    full_bits: list[float] = []
    bits: list[float] = []
    measured = quality(_noting(texts.rows, full, full_bits), _noting(texts.rows, found, bits), clear=clear)
    said = (int(token) for ids in texts.rows for token in ids[1:])
    silent = tokenizer.special_ids - tokenizer.spoken_ids  # no text, though what the model writes itself has some
    size = max(1, sum(len(tokenizer.id_bytes(token)) for token in said if token not in silent))
    return Judged(len(texts.rows), texts.source, measured, sum(full_bits) / size, sum(bits) / size)


def _noting(rows: Iterable[NDArray[np.int64]], logits: Iterable[Any], bits: list[float]) -> Iterator[Any]:
    """The logits, each time with the bits that they give to the tokens of their text but the first."""
    for ids, said in zip(rows, logits, strict=True):
        chances = torch.as_tensor(said)[:-1].double().log_softmax(-1)
        chosen = chances.gather(-1, torch.as_tensor(ids)[1:, None])
        bits.append(-float(chosen.sum()) / log(2))
        yield said
