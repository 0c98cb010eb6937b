import gzip
import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from modicum.tokenizer import Tokenizer, train_tokenizer

CORPUS = Path(__file__).parents[2] / "data" / "small" / "corpus.jsonl.gz"


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """The first 300 documents of the shipped corpus."""
    with gzip.open(CORPUS, "rt", encoding="utf-8") as lines:
        return [json.loads(next(lines))["text"] for _ in range(300)]


@pytest.fixture(scope="session")
def tokenizer(texts: list[str]) -> Tokenizer:
    return train_tokenizer(texts, vocab_size=1000, min_frequency=2, sample_bytes=10**6, seed=0)[0]


@pytest.fixture(scope="session")
def folder(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer as it lies on disk."""
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(path)
    return path


@pytest.fixture(scope="session")
def peer(folder: Path) -> PreTrainedTokenizerFast:
    """transformers' own reading of the saved files."""
    return AutoTokenizer.from_pretrained(folder)
