"""The texts that rounding is fitted to; those that judge it are evaluate's."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from modicum.checkpoint import Checkpoint
from modicum.evaluate.own_texts import own_texts
from modicum.evaluate.texts import Texts, pieces_of
from modicum.store import UserError

_MOST = 20_000  # pieces that are read
_OWN, _OWN_TOKENS, _OWN_SEED = 72, 48, 1_000_000  # other samples than those that may judge
_SHORTEST = 8  # tokens of a row that is tuned on
_TOGETHER = 256  # texts that are encoded together, for ids take many times the memory of a text


def fitting_texts(path: Path | None, checkpoint: Checkpoint) -> list[str]:
    """Of a file or folder in one of the corpus' formats; without one, of what the model itself writes."""
    if path is not None:
        return list(islice(pieces_of(path, "--text"), _MOST))
    written = own_texts(checkpoint, texts=_OWN, tokens=_OWN_TOKENS, first=_OWN_SEED)
    return [checkpoint.tokenizer.decode(ids[1:]) for ids in written]


def without_judges(texts: Sequence[str], judging: Texts, checkpoint: Checkpoint) -> list[str]:
    """The texts that do not begin as one of those that judge: of files that hold both, each has its own."""
    judges = {tuple(row.tolist()) for row in judging.rows}
    longest = max(map(len, judges))
    bos, kept = checkpoint.tokenizer.bos_id, []
    for start in range(0, len(texts), _TOGETHER):
        some = texts[start : start + _TOGETHER]
        begun = ((bos, *ids)[:longest] for ids in checkpoint.tokenizer.encode_batch(some))
        kept += [text for text, ids in zip(some, begun, strict=True) if ids not in judges]
    return kept


def token_rows(checkpoint: Checkpoint, texts: Sequence[str], *, length: int, tokens: int) -> list[Tensor]:
    """Ids (T,) int64 of the texts' beginnings, each from its start, at most `length`; about `tokens` together.

    Raises UserError where there are none.
    """
    rows, total = [], 0
    length = min(length, checkpoint.config.max_position_embeddings)
    for text in texts:
        ids = [checkpoint.tokenizer.bos_id, *checkpoint.tokenizer.encode(text)][:length]
        if len(ids) > 1:
            rows.append(torch.tensor(ids))
            total += len(ids)
        if total >= tokens:
            break
    if not rows:
        raise UserError("--text: no text in it to fit to")
    return rows


def equal_rows(checkpoint: Checkpoint, texts: Sequence[str], *, length: int, tokens: int, fewest: int) -> list[Tensor]:
    """Ids (T,) int64, all rows of one length: texts one after the other, whatever their lengths, cut every `length`.

    About `tokens` together. Where that gives fewer than `fewest` rows, they are shorter. Raises UserError where even
    the shortest do not suffice.
    """
    length = min(length, checkpoint.config.max_position_embeddings)
    stream: list[int] = []
    for text in texts:
        if ids := checkpoint.tokenizer.encode(text):
            stream += [checkpoint.tokenizer.bos_id, *ids]
        if len(stream) >= max(tokens, fewest * length):
            break
    length = min(length, len(stream) // fewest)
    if length < min(_SHORTEST, checkpoint.config.max_position_embeddings):
        needed = fewest * _SHORTEST
        raise UserError(f"--tune: the text has {len(stream)} tokens, {needed} are needed at least; give more of it")
    return list(torch.tensor(stream[: len(stream) // length * length]).view(-1, length))
