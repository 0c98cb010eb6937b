"""Documents and a tokenizer small enough to follow by hand, and the stream they must become."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from string import ascii_lowercase

from modicum.data import Shards, open_shards, write_shards


@dataclass(frozen=True)
class FakeDocument:
    id: str
    text: str
    source: str = "a"


@dataclass(frozen=True)
class ByteTokenizer:
    """One id a byte, after the end of text (0), which stands before a text too, and the pad (1)."""

    vocab_size: int = 320
    bos_id: int = 0
    eot_id: int = 0
    pad_id: int = 1
    hash: str = "0123456789abcdef"

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [[2 + byte for byte in text.encode()] for text in texts]


def make_shards(out: Path, documents: Iterable[FakeDocument], *, seed: int = 0, tokens_per_shard: int = 64) -> Shards:
    tokenizer = ByteTokenizer()
    write_shards(documents, tokenizer, out, seed=seed, tokens_per_shard=tokens_per_shard)
    return open_shards(out, tokenizer_hash=tokenizer.hash)


def documents_of_lengths(lengths: Iterable[int], source: str = "a") -> list[FakeDocument]:
    """Documents of so many tokens each, the leading end of text included, each with a text of its own."""
    return [
        FakeDocument(f"{source}-{i}", "".join(Random(f"{source} {i}").choices(ascii_lowercase, k=length - 1)), source)
        for i, length in enumerate(lengths)
    ]
