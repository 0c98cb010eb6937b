import json
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from modicum.corpus.records import read_file, read_hub
from modicum.recipe import SourceSettings
from modicum.store import UserError


def read(path, **settings):
    return list(read_file(SourceSettings(name="src", path=path, **settings), path.parent, path.name))


def test_a_text_file_is_one_document_named_after_it(tmp_path):
    for name in ("a.txt", "b.md"):
        (tmp_path / name).write_text("some text\nof two lines", "utf-8")
        (record,) = read(tmp_path / name)
        assert (record.id, record.place, record.text) == (name, name, "some text\nof two lines")
        assert (record.domain, record.licence) == ("src", None)


def test_a_record_says_its_id_domain_and_licence(write_lines):
    path = write_lines(
        "a.jsonl", [{"body": "t", "id": 7, "topic": "x", "license": "MIT"}, {"body": "u", "topic": None}]
    )
    first, second = read(path, text_field="body", domain_field="topic")
    assert (first.id, first.domain, first.licence) == ("7", "x", "MIT")
    assert (second.id, second.domain, second.licence) == ("a.jsonl#2", "src", None)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"body": "x", "n": 1}, r"a\.jsonl:1: no field 'text'; the fields are body, n"),
        ({}, r"a\.jsonl:1: no field 'text'; the fields are none"),
        ({"text": None}, r"a\.jsonl:1: text must be a string, found null"),
        ({"text": 3}, r"a\.jsonl:1: text must be a string, found a number"),
        ({"text": "x", "id": ["a"]}, r"a\.jsonl:1: id must be a string or a whole number, found a list"),
        ({"text": "x", "id": True}, r"a\.jsonl:1: id must be .*, found true or false"),
        ({"text": "x", "licence": 2}, r"a\.jsonl:1: licence must be a string"),
    ],
)
def test_a_record_with_a_wrong_field_is_named_with_file_and_line(write_lines, record, message):
    with pytest.raises(UserError, match=message):
        read(write_lines("a.jsonl", [record]))


def test_a_domain_field_that_no_record_has_is_refused(write_lines):
    with pytest.raises(UserError, match=r"a\.jsonl:1: no field 'topic'; the fields are text"):
        read(write_lines("a.jsonl", ["x"]), domain_field="topic")


def test_parquet_gives_the_same_records_as_json_lines(tmp_path, write_lines):
    rows = [{"id": f"r{i}", "text": f"text {i}", "topic": "x", "licence": "MIT"} for i in range(50)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=7)
    lines = read(write_lines("a.jsonl", rows), domain_field="topic")
    packed = read(tmp_path / "a.parquet", domain_field="topic")
    assert [(r.id, r.text, r.domain, r.licence) for r in packed] == [(r.id, r.text, r.domain, r.licence) for r in lines]


def test_a_parquet_file_without_the_field_or_damaged_is_named(tmp_path):
    pq.write_table(pa.table({"body": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet: no field 'text'; the fields are body"):
        read(tmp_path / "a.parquet")
    whole = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "b.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"b\.parquet: not a readable parquet file"):
        read(tmp_path / "b.parquet")


def test_a_parquet_text_that_is_null_or_not_utf8_is_named_with_its_row(tmp_path):
    pq.write_table(pa.table({"text": ["x", None]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet: row 2: text must be a string, found null"):
        read(tmp_path / "a.parquet")
    wrong = pa.array([b"caf\xe9"], pa.binary()).cast(pa.string(), safe=False)
    pq.write_table(pa.table({"text": wrong}), tmp_path / "b.parquet")
    with pytest.raises(UserError, match=r"b\.parquet: after row 0: text that is not UTF-8"):
        read(tmp_path / "b.parquet")


@pytest.fixture
def data_set(tmp_path, monkeypatch):
    """The name of a data set on a Hub that lies here."""
    import datasets

    folder = tmp_path / "set" / "data"
    folder.mkdir(parents=True)
    lines = [json.dumps({"id": f"r{i}", "text": f"row {i}", "topic": "x"}) for i in range(3)]
    (folder / "train-00000.jsonl").write_text("\n".join(lines), "utf-8")
    real, hub = datasets.load_dataset, {"some/set": str(tmp_path / "set")}
    monkeypatch.setattr(datasets, "load_dataset", lambda name, *rest, **how: real(hub[name], *rest, **how))
    return "some/set"


def test_a_data_set_gives_its_rows(data_set):
    records = list(read_hub(SourceSettings(name="h", hub=data_set, domain_field="topic")))
    assert [(r.id, r.place, r.text, r.domain) for r in records] == [
        (f"r{i}", f"train#{i + 1}", f"row {i}", "x") for i in range(3)
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"split": "test"}, r"source h: data set .*cannot be read: Bad split: test"),
        ({"text_field": "body"}, r"row 1: no field 'body'; the fields are id, text, topic"),
    ],
)
def test_a_data_set_that_cannot_be_read_is_named(data_set, settings, message):
    with pytest.raises(UserError, match=message):
        list(read_hub(SourceSettings(name="h", hub=data_set, **settings)))


def test_a_data_set_is_read_as_it_was_at_the_revision_that_is_named(monkeypatch):
    import datasets

    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *what, **how: asked.append((what, how)) or [{"text": "x"}])
    assert [r.text for r in read_hub(SourceSettings(name="h", hub="some/set", subset="en", revision="v1"))] == ["x"]
    assert asked == [(("some/set", "en"), {"split": "train", "revision": "v1", "streaming": True})]


def test_without_the_datasets_package_its_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"pip install 'modicum\[hub\]'"):
        list(read_hub(SourceSettings(name="h", hub="any/set")))
