"""Packed rows as Batches: whole conversations side by side, each blind to the others, padding after the last."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from modicum.data import Batch
from modicum.tune.examples import Examples
from modicum.tune.packing import Packing


def packed_batch(
    examples: Examples,
    rows: Sequence[Sequence[int]],
    *,
    sequence_length: int,
    pad_id: int,
    separate_documents: bool = True,
    pad_rows_to: int = 0,
) -> Batch:
    """One row for each list of example numbers, of at most T + 1 tokens in all; rows of padding up to `pad_rows_to`.

    The last of T + 1 tokens is a target only. A conversation's first token is never a target, so no target stands in
    another conversation than its input. Without `separate_documents` positions run 0..T-1 and all documents are 0.
    Padding has `pad_id`, document -1 and is never supervised. Raises ValueError when a row is too long.
    """
    B, T = max(len(rows), pad_rows_to), sequence_length
    ids = np.full((B, T + 1), pad_id, np.int64)
    supervised = np.zeros((B, T + 1), np.bool_)
    documents = np.full((B, T + 1), -1, np.int32)
    positions = np.zeros((B, T + 1), np.int64)
    for row, members in enumerate(rows):
        begin = 0
        for number, member in enumerate(members):
            tokens, targets = examples[member]
            end = begin + len(tokens)
            if end > T + 1:
                raise ValueError(f"conversations of {end} tokens in a row of {T + 1}")
            ids[row, begin:end] = tokens
            supervised[row, begin + 1 : end] = targets[1:]
            documents[row, begin:end] = number if separate_documents else 0
            positions[row, begin:end] = np.arange(len(tokens))
            begin = end
    if not separate_documents:
        positions[:] = np.arange(T + 1)
    return Batch(
        ids=torch.from_numpy(ids),
        positions=torch.from_numpy(positions[:, :T].copy()),
        documents=torch.from_numpy(documents[:, :T].copy()),
        supervised=torch.from_numpy(supervised),
    )


def packed_batches(
    examples: Examples,
    sequence_length: int,
    max_tokens: int | None = None,
    *,
    pad_id: int,
    batch_size: int = 16,
    separate_documents: bool = True,
) -> Iterator[Batch]:
    """Every example once, or the rows that `max_tokens` inputs allow (one at least): the same ones every time.

    For a held-out loss. All batches have the same number of rows; what the last one lacks is padding.
    """
    packing = Packing(examples.lengths, sequence_length + 1)
    plan = packing.epoch(0, 0)
    count = packing.rows if max_tokens is None else min(packing.rows, max(1, max_tokens // sequence_length))
    batch_size = min(batch_size, count)
    for first in range(0, count, batch_size or 1):
        yield packed_batch(
            examples,
            [plan.row(number) for number in range(first, min(first + batch_size, count))],
            sequence_length=sequence_length,
            pad_id=pad_id,
            separate_documents=separate_documents,
            pad_rows_to=batch_size,
        )
