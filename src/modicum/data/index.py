"""What a folder of shards says of itself: index.json, the names of its files, and what it was made with."""

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from modicum.store import UserError, write_json

FORMAT = 1
_SOURCE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class SourceInfo:
    """One source: documents, tokens (those that begin and end a document included), bytes of UTF-8 text, the largest
    id, and the tokens in each of its files. Those hold one more than `tokens`: what would begin one more document.
    """

    documents: int
    tokens: int
    bytes: int
    max_id: int
    files: tuple[int, ...]


@dataclass(frozen=True)
class ShardsInfo:
    """A folder of shards: the tokenizer it was made with, the dtype of its ids, and its sources by name.

    bos_id stands before each document and eot_id ends it; one token may be both.
    """

    tokenizer_hash: str
    vocab_size: int
    bos_id: int
    eot_id: int
    pad_id: int
    dtype: str
    seed: int
    sources: dict[str, SourceInfo]

    @property
    def tokens(self) -> int:
        return sum(source.tokens for source in self.sources.values())

    @property
    def documents(self) -> int:
        return sum(source.documents for source in self.sources.values())

    @property
    def bytes(self) -> int:
        return sum(source.bytes for source in self.sources.values())

    @property
    def id_dtype(self) -> np.dtype[np.unsignedinteger]:
        """The dtype of the ids as they lie on disk. Raises KeyError for one that no shard has."""
        return np.dtype({"uint16": "<u2", "uint32": "<u4"}[self.dtype])


def mend(shards: Path) -> str:
    """What to do about shards that are not as they were written: training goes on from its checkpoints afterwards."""
    return f"delete {shards} and run `modicum prepare` again; the checkpoints stay"


def source_folder(shards: Path, name: str) -> Path:
    """Where a source's files lie. Raises ValueError for a name that is not a plain folder name."""
    if not _SOURCE_NAME.fullmatch(name):
        raise ValueError(f"not a source name: {name!r} (letters, digits, dots, dashes and underscores)")
    return shards / "sources" / name


def tokens_file(folder: Path, number: int) -> Path:
    return folder / f"{number:05d}.bin"


def offsets_file(folder: Path) -> Path:
    return folder / "documents.npy"


def write_index(shards: Path, info: ShardsInfo) -> None:
    plain = {"format": FORMAT, **asdict(info)}
    if info.bos_id == info.eot_id:
        del plain["bos_id"]
    write_json(shards / "index.json", plain)


def read_index(shards: Path) -> ShardsInfo:
    """The folder's index. Raises UserError when there is none, or it cannot be read as one."""
    path = shards / "index.json"
    try:
        plain: dict[str, Any] = json.loads(path.read_text("utf-8"))
        if plain.pop("format") != FORMAT:
            raise UserError(f"{path}: written by another version of modicum; {mend(shards)}")
        sources = {
            name: SourceInfo(**{**source, "files": tuple(source["files"])})
            for name, source in plain.pop("sources").items()
        }
        info = ShardsInfo(**{"bos_id": plain["eot_id"], **plain}, sources=sources)
        _ = info.id_dtype, [source_folder(shards, name) for name in sources]
        return info
    except FileNotFoundError:
        raise UserError(f"{path}: missing, so there are no finished shards here; run `modicum prepare`") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: damaged, not an index of shards ({error}); {mend(shards)}") from error
