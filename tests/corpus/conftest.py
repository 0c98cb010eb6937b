"""What the tests of this room share: a corpus from a few texts, prepared in one call."""

import json
from pathlib import Path

import pytest

from modicum.corpus import CorpusReport, prepare_corpus
from modicum.recipe import CorpusSettings, SourceSettings


@pytest.fixture
def write_lines(tmp_path):
    """Write records (or plain texts) as a .jsonl file below tmp_path; returns its path."""

    def write(name: str, records: list) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(r if isinstance(r, dict) else {"text": r}) for r in records]
        path.write_text("\n".join(lines) + "\n", "utf-8")
        return path

    return write


@pytest.fixture
def prepare(tmp_path):
    """Prepare sources (name to path, or SourceSettings) into tmp_path/out; keywords are CorpusSettings."""

    def run(*sources, out="out", seed=0, against=(), progress=None, **settings) -> tuple[Path, CorpusReport]:
        made = [s if isinstance(s, SourceSettings) else SourceSettings(name="a", path=s) for s in sources]
        corpus = CorpusSettings(sources=made, **settings)
        report = prepare_corpus(
            corpus, tmp_path / out, seed=seed, decontaminate_against=list(against), progress=progress
        )
        return tmp_path / out, report

    return run


@pytest.fixture
def prose():
    """prose(k): text k of endlessly many that share no run of five words; about 60 words each."""

    def text(k: int, words: int = 60) -> str:
        return " ".join(f"w{k}x{i}" if i % 3 else "the" for i in range(words)) + "."

    return text
