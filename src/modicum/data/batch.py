"""What a training step eats: rows of packed windows, with positions and document numbers that keep documents apart."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from modicum.data.index import mend
from modicum.data.shards import Shards
from modicum.store import UserError


@dataclass(frozen=True)
class Batch:
    """B rows of T inputs and their targets, as CPU tensors. Inputs are ids[:, :-1], targets ids[:, 1:].

    ids (B, T+1) int64; positions (B, T) int64, from 0 in each document; documents (B, T) int32, numbered 0, 1, 2.. in
    a row, -1 is padding; supervised (B, T+1) bool, true where the token at this place is a target ([:, 0] never is).
    Nothing is shifted here: that is the loss's affair alone.
    """

    ids: Tensor
    positions: Tensor
    documents: Tensor
    supervised: Tensor

    @property
    def rows(self) -> int:
        return self.ids.shape[0]

    @property
    def supervised_tokens(self) -> int:
        """How many targets count in the loss."""
        return int(self.supervised.sum())

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "Batch":
        """The same batch on a device."""
        parts = (self.ids, self.positions, self.documents, self.supervised)
        return Batch(*(part.to(device, non_blocking=non_blocking) for part in parts))


def split(batch: Batch, micro_batch_size: int) -> Iterator[Batch]:
    """The batch's rows in order, as views of `micro_batch_size` rows; a shorter last one when it does not divide."""
    for first in range(0, batch.rows, micro_batch_size):
        rows = slice(first, first + micro_batch_size)
        yield Batch(batch.ids[rows], batch.positions[rows], batch.documents[rows], batch.supervised[rows])


def window_batch(
    shards: Shards,
    rows: Sequence[tuple[str, int]],
    *,
    sequence_length: int,
    separate_documents: bool = True,
    pad_rows_to: int = 0,
) -> Batch:
    """One row for each (source, window). Window i holds the source's tokens i·T .. i·T+T, the last a target only.

    The target of a document's end, which would be the start of the next one, does not count: nobody asks a model to go
    on there, and so sure a target would make losses look lower than another tokenizer's. Where one token both begins
    and ends documents, it is the end of the one before it, and counts.
    A document that goes on from the window before starts at position 0 again. Without `separate_documents` positions
    run 0..T-1 and all documents are 0. Rows of padding are added up to `pad_rows_to`. Raises UserError for an id that
    the vocabulary does not have.
    """
    B, T = max(len(rows), pad_rows_to), sequence_length
    ids = np.full((B, T + 1), shards.info.pad_id, np.int64)
    starts = np.zeros((B, T), np.bool_)
    lengths = np.zeros((B, 1), np.int64)
    for row, (name, window) in enumerate(rows):
        source = shards.sources[name]
        begin = window * T
        length = min(T, source.tokens - begin)
        tokens = source.read(begin, begin + length + 1)
        if tokens.max() >= shards.info.vocab_size:
            raise UserError(
                f"{source.folder}: holds the id {tokens.max()}, beyond the vocabulary of {shards.info.vocab_size}; "
                f"the shards are damaged: {mend(shards.path)}"
            )
        ids[row, : length + 1] = tokens
        starts[row, source.document_starts(begin, begin + length) - begin] = True
        lengths[row] = length
    places = np.arange(T)
    real = places < lengths
    starts[:, 0] = False  # the row's first document is number 0 whether it starts here or goes on
    if separate_documents:
        documents = np.where(real, starts.cumsum(axis=1), -1)
        positions = np.where(real, places - np.maximum.accumulate(np.where(starts, places, 0), axis=1), 0)
    else:
        documents = np.where(real, 0, -1)
        positions = np.tile(places, (B, 1))
    supervised = np.zeros((B, T + 1), np.bool_)
    supervised[:, 1:] = real
    if shards.info.bos_id != shards.info.eot_id:
        supervised[:, 1:] &= ids[:, :-1] != shards.info.eot_id  # no text contains it, so it stands at ends alone
    return Batch(
        ids=torch.from_numpy(ids),
        positions=torch.from_numpy(positions.astype(np.int64, copy=False)),
        documents=torch.from_numpy(documents.astype(np.int32)),
        supervised=torch.from_numpy(supervised),
    )
