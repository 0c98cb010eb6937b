"""The texts that rounding is fitted to, and others that it is judged by."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from modicum.checkpoint import Checkpoint
from modicum.corpus import Document
from modicum.corpus.inputs import find_files
from modicum.corpus.records import read_file
from modicum.evaluate.own_texts import own_texts
from modicum.recipe import SourceSettings
from modicum.store import UserError

_PIECE = 2000  # characters; a document is cut, so that a single one suffices
_EVERY = 4  # of these pieces one judges
_MOST = 20_000  # pieces that are read
_OWN, _OWN_TOKENS = 96, 48


@dataclass(frozen=True)
class Texts:
    """Pieces of text. own: written by the model itself."""

    fit: list[Document]
    judge: list[Document]
    own: bool


def read_texts(path: Path | None, checkpoint: Checkpoint) -> Texts:
    """Of a file or folder in one of the corpus' formats; without one, of what the model itself writes.

    Raises UserError where there is too little.
    """
    pieces: list[Document] = []
    source = str(path or "the model itself")
    for number, text in enumerate(_written(checkpoint) if path is None else _read(path)):
        cut = [text[at : at + _PIECE] for at in range(0, len(text), _PIECE)]
        pieces += [Document(f"{number}-{at}", piece, source, "text", None) for at, piece in enumerate(cut)]
        if len(pieces) >= _MOST:
            break
    judge = pieces[::_EVERY]
    if len(pieces) < 2 * _EVERY:
        raise UserError(f"{source}: {len(pieces)} pieces of text are too few to fit to and judge by; give a longer one")
    return Texts([piece for place, piece in enumerate(pieces) if place % _EVERY], judge, path is None)


def token_rows(checkpoint: Checkpoint, documents: list[Document], *, length: int, tokens: int) -> list[Tensor]:
    """Ids (T,) int64 of the documents' beginnings, each from its start, at most `length`; about `tokens` together."""
    rows, total = [], 0
    length = min(length, checkpoint.config.max_position_embeddings)
    for document in documents:
        ids = [checkpoint.tokenizer.bos_id, *checkpoint.tokenizer.encode(document.text)][:length]
        if len(ids) > 1:
            rows.append(torch.tensor(ids))
            total += len(ids)
        if total >= tokens:
            break
    return rows


def _written(checkpoint: Checkpoint) -> Iterator[str]:
    for ids in own_texts(checkpoint, texts=_OWN, tokens=_OWN_TOKENS):
        yield checkpoint.tokenizer.decode(ids[1:])


def _read(path: Path) -> Iterator[str]:
    if not path.exists():
        raise UserError(f"{path}: no such file; --text takes a .txt, .md or .jsonl file, or a folder of them")
    source = SourceSettings(name="text", path=path)
    files = find_files(source)
    for name in files.names:
        for record in read_file(source, files.root or path, name):
            yield record.text
