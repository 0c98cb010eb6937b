import json
from pathlib import Path

import pytest
import zstandard

from modicum.corpus import prepare_corpus, read_choices, read_conversations, read_documents
from modicum.recipe import CorpusSettings, SourceSettings
from modicum.store import UserError

SMALL = Path(__file__).parents[2] / "data" / "small"


def test_prepared_documents_are_read_back_with_all_their_fields(tmp_path):
    text = "A text that is long enough to be kept by the filter."
    (tmp_path / "a.jsonl").write_text(json.dumps({"id": "x", "text": text, "licence": "MIT", "kind": "note"}))
    source = SourceSettings(name="notes", path=tmp_path / "a.jsonl", domain_field="kind")
    prepare_corpus(CorpusSettings(sources=[source]), tmp_path / "out", seed=0, decontaminate_against=[])
    (document,) = read_documents(tmp_path / "out")
    assert (document.id, document.source, document.domain, document.licence) == ("x", "notes", "note", "MIT")
    assert document.text == text
    assert list(read_documents(tmp_path / "out", "heldout")) == []


def test_a_folder_that_is_no_corpus_is_named(tmp_path):
    with pytest.raises(UserError, match="not a prepared corpus"):
        list(read_documents(tmp_path))


@pytest.mark.parametrize("damage", ["flipped", "cut", "foreign"])
def test_a_damaged_corpus_is_named_with_what_makes_it_anew(tmp_path, damage):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "A text that is long enough to be kept by the filter."}))
    settings = CorpusSettings(sources=[SourceSettings(name="notes", path=tmp_path / "a.jsonl")])
    out = tmp_path / "out"
    prepare_corpus(settings, out, seed=0, decontaminate_against=[])
    file = out / "documents" / "notes.jsonl.zst"
    whole = file.read_bytes()
    flipped = bytes([*whole[:-9], whole[-9] ^ 1, *whole[-8:]])
    file.write_bytes({"flipped": flipped, "cut": whole[:-9], "foreign": zstandard.compress(b'{"text": "x"}\n')}[damage])
    with pytest.raises(UserError, match=rf"notes\.jsonl\.zst.*, or delete {out} and run `modicum prepare` again$"):
        list(read_documents(out))


def test_the_shipped_conversations_and_questions_are_valid():
    assert sum(1 for _ in read_conversations(SMALL / "instruct.jsonl.gz")) == 6019
    assert len(read_choices(SMALL / "eval.jsonl")) == 300
