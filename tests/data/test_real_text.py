import gzip
import json
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
import torch

from modicum.corpus import Document
from modicum.data import Shards, WindowRows, open_shards, write_shards
from modicum.store import UserError
from modicum.tokenizer import Tokenizer, train_tokenizer

CORPUS = Path(__file__).parents[2] / "data/small/corpus.jsonl.gz"


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    with gzip.open(CORPUS, "rt", encoding="utf-8") as file:
        records = [json.loads(line) for line in islice(file, 200)]
    return [Document(r["id"], r["text"], r["source"], r["source"], r["licence"]) for r in records]


@pytest.fixture(scope="module")
def tokenizer(documents: list[Document]) -> Tokenizer:
    texts = [document.text for document in documents]
    return train_tokenizer(texts, vocab_size=512, min_frequency=2, sample_bytes=10**6, seed=0)[0]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory, documents: list[Document], tokenizer: Tokenizer) -> Shards:
    out = tmp_path_factory.mktemp("real") / "shards"
    write_shards(documents, tokenizer, out, seed=0, tokens_per_shard=10_000)
    return open_shards(out, tokenizer_hash=tokenizer.hash)


def test_an_epoch_of_batches_decodes_to_the_documents_that_went_in(
    documents: list[Document], tokenizer: Tokenizer, shards: Shards
) -> None:
    T, found = 128, []
    n = sum(shards.windows(T).values())
    rows = WindowRows(shards, sequence_length=T, seed=0)
    batch = rows.batch(0, n)
    found_in = dict(zip(rows.mixture.rows(0, n), zip(batch.ids, batch.documents, strict=True), strict=True))
    for name, count in shards.windows(T).items():
        windows = [found_in[name, i] for i in range(count)]
        stream = torch.cat([ids[:-1][numbers >= 0] for ids, numbers in windows]).tolist()
        starts = [place for place, token in enumerate(stream) if token == tokenizer.eot_id]
        found += [tokenizer.decode(stream[i + 1 : j]) for i, j in zip(starts, [*starts[1:], len(stream)], strict=True)]
    assert Counter(found) == Counter(document.text for document in documents)


def test_the_index_counts_the_bytes_that_bits_per_byte_divides_by(documents: list[Document], shards: Shards) -> None:
    for name, info in shards.info.sources.items():
        assert info.bytes == sum(len(d.text.encode()) for d in documents if d.source == name)
        assert info.documents == sum(d.source == name for d in documents)


def test_a_retrained_tokenizer_does_not_open_the_old_shards(shards: Shards) -> None:
    other, _ = train_tokenizer(["another text " * 50], vocab_size=512, min_frequency=2, sample_bytes=10**6, seed=0)
    with pytest.raises(UserError, match="written with another tokenizer"):
        open_shards(shards.path, tokenizer_hash=other.hash)


def test_a_lone_surrogate_names_its_document(tmp_path: Path, tokenizer: Tokenizer) -> None:
    bad = Document("notes/7", "half a \ud83d", "notes", "notes", None)
    with pytest.raises(UserError, match="document notes/7 of source notes"):
        write_shards([bad], tokenizer, tmp_path / "s", seed=0)
