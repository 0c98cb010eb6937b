"""One document of the prepared corpus, and reading them back in their fixed order."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from modicum.corpus.files import OWN_LIMIT, read_json_lines
from modicum.store import UserError

FOLDERS = {"train": "documents", "heldout": "heldout"}


@dataclass(frozen=True)
class Document:
    """Cleaned text and where it comes from. `id` is unique within `source`; `domain` is what evaluation groups by."""

    id: str
    text: str
    source: str
    domain: str
    licence: str | None


def read_documents(corpus_dir: Path, split: Literal["train", "heldout"] = "train") -> Iterator[Document]:
    """Every document of one split, source by source in the order of names.

    Raises UserError when there is no corpus, or its files are not as they were written.
    """
    folder = corpus_dir / FOLDERS[split]
    if not folder.is_dir():
        raise UserError(
            f"{corpus_dir}: not a prepared corpus (it has no folder {folder.name}); `modicum prepare` makes one"
        )
    for path in sorted(folder.glob("*.jsonl.zst")):
        try:
            for number, record in read_json_lines(path, OWN_LIMIT):
                yield _document(record, f"{path}:{number}")
        except UserError as error:
            raise UserError(f"{error}, or delete {corpus_dir} and run `modicum prepare` again") from None


def _document(record: dict[str, Any], origin: str) -> Document:
    try:
        return Document(**record)
    except TypeError:
        raise UserError(f"{origin}: not a document of a prepared corpus; take the file out") from None
