"""The corpus that lies in the repository: every part under the licence it came with, its text beside it."""

import gzip
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = ROOT / "data" / "small"


def licences(name):
    with gzip.open(SMALL / name, "rt", encoding="utf-8") as file:
        return {json.loads(line)["licence"] for line in file}


@pytest.mark.parametrize("name", ["corpus.jsonl.gz", "instruct.jsonl.gz"])
def test_the_full_text_of_every_copyleft_licence_lies_beside_the_texts(name):
    present = {path.name for path in (SMALL / "licences").iterdir()}
    for licence in licences(name):
        for family, version in re.findall(r"\b(GPL|GFDL)-(\d)", licence):
            wanted = {"GPL": f"GPL-{version}", "GFDL": "GFDL-1.2"}[family]
            assert wanted in present, licence


def test_the_copyleft_corpus_is_no_part_of_the_package():
    for path in (ROOT / "src").rglob("*.gz"):
        with gzip.open(path, "rt", encoding="utf-8") as file:
            found = {json.loads(line)["licence"] for line in file}
        assert not [licence for licence in found if re.search("GPL|GFDL|CC-BY-SA|MPL", licence)], path
