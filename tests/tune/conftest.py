"""A real tokenizer, trained on the shipped conversations, and a way to write conversations down."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tune_chats import INSTRUCT

from modicum.tokenizer import Tokenizer, train_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    with gzip.open(INSTRUCT, "rt", encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    texts = (message["content"] for line in lines for message in line["messages"])
    return train_tokenizer(texts, vocab_size=1024, min_frequency=2, sample_bytes=2_000_000, seed=0)[0]


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write lists of messages as lines of a file."""

    def write_lines(*conversations: list[dict[str, Any]], name: str = "chat.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in conversations), "utf-8")
        return path

    return write_lines
