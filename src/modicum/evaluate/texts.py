"""The texts by which a rounded or converted model is judged: held-out ones where there are any, else its own."""

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from modicum.checkpoint import Checkpoint
from modicum.corpus import read_documents
from modicum.corpus.inputs import find_files
from modicum.corpus.records import read_file
from modicum.evaluate.own_texts import own_texts
from modicum.recipe import SourceSettings
from modicum.store import RunDirectory, UserError, hash_file, hash_json

PIECE = 2000  # characters; a document is cut, so that a single one suffices
_FEWEST = 64  # positions below which a share of them says nothing
_STAGES, _SPLITS = ("pretrain", "sft"), ("train", "heldout")


@dataclass(frozen=True)
class Texts:
    """rows: ids (T,) of each text, what opens a document in front. source: whose they are, in words."""

    rows: tuple[NDArray[np.int64], ...]
    source: str


def judging_texts(checkpoint: Checkpoint, path: Path | None = None, *, texts: int, tokens: int) -> Texts:
    """At most `texts` texts of at most `tokens` ids, the same ones each time.

    They are those of the file or folder `path`; without one, of the held-out part of the run that the checkpoint lies
    in; where there is none, or it may have been trained on, what the model writes itself. Raises UserError for a path
    with too little text in it.
    """
    if path is not None:
        found = Texts(_rows(checkpoint, pieces_of(path, "--heldout"), texts, tokens), str(path))
        if (positions := sum(map(len, found.rows))) < _FEWEST:
            raise UserError(f"--heldout {path}: {positions} tokens are too few to judge by; give {_FEWEST} or more")
        return found
    reason = ""
    if (run := run_of(checkpoint.path)) is not None and (run / "corpus" / "text" / "heldout").is_dir():
        if trained_beside(RunDirectory(run), checkpoint.path.resolve().parent.parent.name):
            documents = read_documents(run / "corpus" / "text", "heldout")
            rows = _rows(checkpoint, _cut(document.text for document in documents), texts, tokens)
            if sum(map(len, rows)) >= _FEWEST:
                return Texts(rows, f"held-out text of {run.name}")
        else:
            reason = f", for it may have been trained on the held-out text that {run.name} has now"
    written = own_texts(checkpoint, texts=texts, tokens=tokens)
    return Texts(tuple(np.array(ids, dtype=np.int64) for ids in written), f"the model's own texts{reason}")


def run_of(checkpoint: Path) -> Path | None:
    """The folder of the run that wrote it, where it lies there still: RUN/STAGE/checkpoints/step-N."""
    folder = checkpoint.resolve()
    stage = folder.parent.parent
    inside = folder.parent.name == "checkpoints" and stage.name in _STAGES and (stage.parent / "recipe.yaml").is_file()
    return stage.parent if inside else None


def trained_beside(run: RunDirectory, stage: str) -> bool:
    """Whether the model of a stage, pretrain or sft, came from the corpus that lies in the run now: by the hashes of
    what each finished stage on the way was made from."""

    def made_from(name: str, what: str, hash: str) -> bool:
        manifest = run.stage(name).manifest()
        return manifest is not None and manifest.inputs.get(what) == hash

    def hash_of(*folder: str) -> str:
        return hash_file(run.path.joinpath(*folder, "manifest.json"))

    try:
        return (
            made_from("shards", "corpus", hash_of("corpus", "text"))
            and made_from("pretrain", "shards", hash_json({part: hash_of("shards", part) for part in _SPLITS}))
            and (stage == "pretrain" or made_from(stage, "base", hash_of("pretrain", "checkpoints", "last")))
        )
    except FileNotFoundError:
        return False


def pieces_of(path: Path, option: str) -> Iterator[str]:
    """The texts of a file or folder in one of the corpus' formats, in pieces. Raises UserError naming the option."""
    if not path.exists():
        raise UserError(f"{option} {path}: no such file; it takes a .txt, .md, .jsonl or .parquet file, or a folder")
    source = SourceSettings(name="text", path=path)
    files = find_files(source)
    yield from _cut(record.text for name in files.names for record in read_file(source, files.root or path, name))


def chosen(pieces: Iterable[str], most: int) -> list[str]:
    """At most so many pieces, which their hashes choose and order, wherever they stand; one that stands twice counts
    once."""
    return [piece for _, piece in heapq.nsmallest(most, _distinct(pieces))]


def _cut(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        yield from (text[at : at + PIECE] for at in range(0, len(text), PIECE))


def _rows(checkpoint: Checkpoint, pieces: Iterable[str], texts: int, tokens: int) -> tuple[NDArray[np.int64], ...]:
    """Of the chosen pieces."""
    tokens = min(tokens, checkpoint.config.max_position_embeddings)
    # more than are wanted: some may be a blank or two
    rows = (
        np.array([checkpoint.tokenizer.bos_id, *checkpoint.tokenizer.encode(piece)][:tokens], dtype=np.int64)
        for piece in chosen(pieces, 4 * texts)
    )
    return tuple([row for row in rows if len(row) > 1][:texts])


def _distinct(pieces: Iterable[str]) -> Iterator[tuple[bytes, str]]:
    """Each piece once, with its hash in front."""
    seen = set()
    for piece in pieces:
        digest = sha256(piece.encode()).digest()
        if digest not in seen:
            seen.add(digest)
            yield digest, piece
