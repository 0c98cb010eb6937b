"""The texts that rounding is fitted to, as ids; those that judge it are evaluate's."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modicum.checkpoint import Checkpoint
from modicum.evaluate.own_texts import own_texts
from modicum.evaluate.texts import Texts, chosen, pieces_of
from modicum.store import UserError

_MOST = 20_000  # pieces that are kept
_OWN, _OWN_TOKENS, _OWN_SEED = 72, 48, 1_000_000  # other samples than those that may judge
_SHORTEST = 8  # tokens of a row that is tuned on
_TOGETHER = 256  # texts that are encoded together: lists of ids take many times the memory of a text

Ids = NDArray[np.unsignedinteger[Any]]


def fitting_texts(path: Path | None, checkpoint: Checkpoint) -> list[Ids]:
    """Ids (T,) of each text, what opens a document in front, in the smallest type that holds them.

    Pieces of a file or folder in one of the corpus' formats, chosen by their hashes; without one, what the model itself
    writes, as it wrote it.
    """
    tokenizer = checkpoint.tokenizer
    smallest = np.min_scalar_type(tokenizer.vocab_size - 1)
    if path is None:
        written = own_texts(checkpoint, texts=_OWN, tokens=_OWN_TOKENS, first=_OWN_SEED)
        return [np.array(ids, dtype=smallest) for ids in written]
    pieces, texts = chosen(pieces_of(path, "--text"), _MOST), []
    for start in range(0, len(pieces), _TOGETHER):
        encoded = tokenizer.encode_batch(pieces[start : start + _TOGETHER])
        texts += [np.array([tokenizer.bos_id, *ids], dtype=smallest) for ids in encoded]
    return texts


def without_judges(texts: Sequence[Ids], judging: Texts) -> list[Ids]:
    """The texts that do not begin as one of those that judge: of files that hold both, each has its own."""
    judges = {tuple(row.tolist()) for row in judging.rows}
    longest = max(map(len, judges))
    return [ids for ids in texts if tuple(ids[:longest].tolist()) not in judges]


def token_rows(texts: Sequence[Ids], *, length: int, tokens: int) -> list[Tensor]:
    """Ids (T,) int64 of the texts' beginnings, each from its start, at most `length`; about `tokens` together.

    Raises UserError where there are none.
    """
    rows, total = [], 0
    for ids in texts:
        if len(ids) > 1:
            rows.append(torch.from_numpy(ids[:length].astype(np.int64)))
            total += len(rows[-1])
        if total >= tokens:
            break
    if not rows:
        raise UserError("--text: no text in it to fit to")
    return rows


def equal_rows(texts: Sequence[Ids], *, length: int, tokens: int, fewest: int) -> list[Tensor]:
    """Ids (T,) int64, all rows of one length: texts one after the other, whatever their lengths, cut every `length`.

    About `tokens` together. Where that gives fewer than `fewest` rows, they are shorter. Raises UserError where even
    the shortest do not suffice.
    """
    shortest = min(_SHORTEST, length)
    stream: list[int] = []
    for ids in texts:
        if len(ids) > 1:
            stream += ids.tolist()
        if len(stream) >= max(tokens, fewest * length):
            break
    length = min(length, len(stream) // fewest)
    if length < shortest:
        needed = fewest * _SHORTEST
        raise UserError(f"--tune: the text has {len(stream)} tokens, {needed} are needed at least; give more of it")
    return list(torch.tensor(stream[: len(stream) // length * length]).view(-1, length))
