import gzip
import json
from pathlib import Path

import pytest

import modicum.road.starter as starter
from modicum.recipe import load_recipe
from modicum.road.starter import write_starter
from modicum.store import UserError

HERE = Path(starter.__file__).parent
COPYLEFT = ("GPL", "GFDL", "CC-BY-SA", "LGPL", "MPL")


def test_the_starter_recipe_loads_where_it_was_written(tmp_path):
    written = write_starter(tmp_path / "mine")
    assert all(path.is_file() for path in written)
    assert load_recipe(tmp_path / "mine" / "recipe.yaml").corpus.sources[0].path.is_file()


def test_an_empty_folder_is_taken_and_a_used_one_refused(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert all(path.is_file() for path in write_starter(Path()))
    write_starter(tmp_path / "empty")
    with pytest.raises(UserError, match="not empty"):
        write_starter(tmp_path / "empty")


@pytest.mark.parametrize("name", ["corpus.jsonl.gz", "instruct.jsonl.gz"])
def test_nothing_copyleft_is_shipped(name):
    with gzip.open(HERE / name, "rt", encoding="utf-8") as file:
        licences = {json.loads(line)["licence"] for line in file}
    assert licences
    assert not [licence for licence in licences if any(word in licence for word in COPYLEFT)]


def test_questions_come_from_the_shipped_sources_only():
    sources = {json.loads(line)["source"] for line in (HERE / "eval.jsonl").read_text("utf-8").splitlines()}
    assert all(source.startswith(("CWE", "MITRE")) for source in sources)
