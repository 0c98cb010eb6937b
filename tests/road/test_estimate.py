"""How much text there is, before anything is prepared."""

import gzip
import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from modicum.recipe import SourceSettings
from modicum.road import estimate
from modicum.road.estimate import bytes_per_token, source_text, talk

SMALL = Path(__file__).parents[2] / "data" / "small"


def words(count, seed):
    letters = random.Random(seed)
    return " ".join("".join(letters.choices("abcdefghij", k=6)) for _ in range(count))


def test_a_small_source_is_counted_to_the_byte():
    source = SourceSettings(name="small", path=SMALL / "corpus.jsonl.gz")
    with gzip.open(source.path, "rt", encoding="utf-8") as file:
        expected = sum(len(json.loads(line)["text"].encode()) for line in file)
    size = source_text(source)
    assert (size.bytes, size.exact) == (expected, True)


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz"])
def test_a_large_source_is_extrapolated_from_what_was_read(tmp_path, suffix):
    for number in range(40):
        data = words(2000, number).encode()
        (tmp_path / f"{number:02}{suffix}").write_bytes(gzip.compress(data) if suffix.endswith("gz") else data)
    source = SourceSettings(name="many", path=tmp_path)
    whole, part = source_text(source), source_text(source, read_bytes=50_000)
    assert whole.exact
    assert not part.exact
    assert part.bytes == pytest.approx(whole.bytes, rel=0.02)


def test_one_large_file_is_estimated_from_its_size(tmp_path):
    path = tmp_path / "one.txt"
    path.write_text(words(20_000, 0))
    size = source_text(SourceSettings(name="one", path=path), read_bytes=1000)
    assert (size.bytes, size.exact) == (path.stat().st_size, False)


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet"])
def test_what_stands_beside_the_text_in_a_record_is_no_text_beyond_the_sample_either(tmp_path, suffix):
    rows = [{"text": words(40, number), "notes": words(120, -number)} for number in range(1, 1000)]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path = tmp_path / f"one{suffix}"
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=100)
    else:
        pack = {".jsonl": bytes, ".jsonl.gz": gzip.compress, ".jsonl.zst": zstandard.compress}[suffix]
        path.write_bytes(pack(lines))
    source = SourceSettings(name="one", path=path)
    whole, part = source_text(source), source_text(source, read_bytes=90_000)
    assert (whole.exact, part.exact) == (True, False)
    assert part.bytes == pytest.approx(whole.bytes, rel=0.1)


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_conversations_beyond_the_sample_are_counted_by_what_those_in_it_take(tmp_path, monkeypatch, pack):
    talks = [
        [{"role": "user", "content": words(9, n)}, {"role": "assistant", "content": words(30, -n)}] for n in range(3000)
    ]
    paths = [tmp_path / f"{number}.jsonl{'.gz' if pack is gzip.compress else ''}" for number in (0, 1)]
    for number, path in enumerate(paths):
        lines = [json.dumps({"messages": talk, "notes": "x" * 500}) for talk in talks[number::2]]
        path.write_bytes(pack("\n".join(lines).encode()))
    how = {"vocab_size": 4096, "sequence_length": 128, "heldout_fraction": 0.1}
    whole = talk(paths, **how)
    monkeypatch.setattr(estimate, "_READ_CONVERSATIONS", 1800)
    part = talk(paths, **how)
    assert (whole.exact, part.exact) == (True, False)
    for name in ("conversations", "tokens", "rows"):
        assert getattr(part, name) == pytest.approx(getattr(whole, name), rel=0.1)


def test_the_text_of_a_hub_data_set_is_not_known():
    assert source_text(SourceSettings(name="far", hub="some/set")).bytes is None


def test_bytes_a_token_grow_with_the_vocabulary_and_are_the_measured_ones():
    assert bytes_per_token(4096) == 3.57
    sizes = [100, 320, 400, 1024, 5000, 16_384, 30_000, 32_768, 200_000]
    rates = [bytes_per_token(size) for size in sizes]
    assert rates == sorted(rates)
    assert (rates[0], rates[-1]) == (1.38, 4.41)


def test_the_shipped_conversations_take_about_the_rows_that_they_really_take():
    found = talk([SMALL / "instruct.jsonl.gz"], vocab_size=4096, sequence_length=512, heldout_fraction=0.0)
    assert found.conversations == 6019
    assert found.exact
    # 6,019 conversations rendered with a tokenizer of 4,096 trained on the shipped corpus
    assert found.tokens == pytest.approx(565_163, rel=0.05)
    assert found.rows == pytest.approx(found.tokens / 513, rel=0.02)


def test_what_is_held_out_is_not_trained_on():
    path = SMALL / "instruct.jsonl.gz"
    half = talk([path], vocab_size=4096, sequence_length=512, heldout_fraction=0.5)
    assert half.conversations == round(6019 / 2)
