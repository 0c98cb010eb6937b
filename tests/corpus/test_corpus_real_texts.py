import gzip
import json
from pathlib import Path

import pytest

from modicum.corpus import read_choices, read_documents
from modicum.corpus.contamination import Contamination
from modicum.recipe import FilterSettings, SourceSettings

SMALL = Path(__file__).parents[2] / "data" / "small"


@pytest.fixture(scope="module")
def texts():
    with gzip.open(SMALL / "corpus.jsonl.gz") as file:
        return {record["id"]: record["text"] for record in map(json.loads, file)}


@pytest.fixture(scope="module")
def questions():
    """Kind to questions."""
    items = read_choices(SMALL / "eval.jsonl")
    return {kind: [item.question for item in items if item.kind == kind] for kind in ("recall", "generalisation")}


def test_no_fact_that_a_recall_question_asks_for_is_removed(write_lines, prepare, texts, questions):
    leaks = [f"Somebody wrote in a forum: {question} Nobody answered." for question in questions["generalisation"]]
    sources = [
        SourceSettings(name="small", path=SMALL / "corpus.jsonl.gz", domain_field="source"),
        SourceSettings(
            name="web", path=write_lines("web.jsonl", [*leaks, "A page of its own that has no question in it."])
        ),
    ]
    filters = FilterSettings(repetition=False, near_duplicates=False, length=False)
    out, report = prepare(*sources, against=questions["generalisation"], filters=filters)
    small, web = report.sources
    assert small.dropped == {}
    assert web.dropped == {"contains an evaluation item": len(leaks)}
    read = [d for split in ("train", "heldout") for d in read_documents(out, split) if d.source == "small"]
    assert {document.id: document.text for document in read} == texts


def test_recall_questions_would_remove_facts_so_they_must_not_be_passed(texts, questions):
    index = Contamination.of(questions["recall"], 13)
    assert sum(map(index.found_in, texts.values())) > 20
