import json

import pytest

from modicum.corpus import Choice, read_choices
from modicum.store import UserError

ITEM = {"id": "q", "question": "Why?", "choices": ["a", "b"], "answer": 1, "kind": "recall"}


def test_an_item_is_read_with_its_fields(write_lines):
    path = write_lines("a.jsonl", [ITEM, {**ITEM, "id": "r", "kind": "generalisation", "source": "s", "other": 0}])
    assert read_choices(path) == [
        Choice("q", "Why?", ["a", "b"], 1, "recall", None),
        Choice("r", "Why?", ["a", "b"], 1, "generalisation", "s"),
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"id": None}, "id must be a string that is not blank, found null"),
        ({"question": " "}, "question must be a string that is not blank"),
        ({"choices": "ab"}, "choices must be a list of strings"),
        ({"choices": ["a", 2]}, "choices must be a list of strings"),
        ({"choices": ["a"], "answer": 0}, "at least two choices"),
        ({"choices": ["a", "a"]}, "all different"),
        ({"answer": 2}, "answer must be a number from 0 to 1, found 2"),
        ({"answer": -1}, "answer must be a number from 0 to 1, found -1"),
        ({"answer": "b"}, "answer must be a number from 0 to 1, found 'b'"),
        ({"answer": True}, "answer must be a number from 0 to 1, found True"),
        ({"kind": "generalization"}, "kind is 'generalization'; expected recall or generalisation"),
        ({"source": 1}, "source must be a string, found a number"),
        ({"id": "q"}, "id 'q' is that of line 1 too"),
    ],
)
def test_a_faulty_item_is_named_with_file_and_line(write_lines, change, message):
    path = write_lines("a.jsonl", [ITEM, {**ITEM, "id": "r", **change}])
    with pytest.raises(UserError, match=rf"a\.jsonl:2: .*{message}"):
        read_choices(path)


@pytest.mark.parametrize("field", list(ITEM))
def test_every_field_is_needed(tmp_path, field):
    (tmp_path / "a.jsonl").write_text(json.dumps({k: v for k, v in ITEM.items() if k != field}))
    with pytest.raises(UserError, match=rf"a\.jsonl:1: .*{field}"):
        read_choices(tmp_path / "a.jsonl")


def test_a_file_without_questions_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(UserError, match=r"a\.jsonl: no question"):
        read_choices(tmp_path / "a.jsonl")
