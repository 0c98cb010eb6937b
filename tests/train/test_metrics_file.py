import json

import pytest

from modicum.train.metrics import MetricsFile, read_metrics


def steps(path):
    return [(record["kind"], record["step"]) for record in read_metrics(path)]


def test_a_run_that_goes_on_keeps_no_line_from_after_its_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path, step=0) as metrics:
        for step in (10, 20, 30):
            metrics.write("train", step, loss=1.0)
            metrics.write("heldout", step, loss=1.0)
    with MetricsFile(path, step=20) as metrics:
        metrics.write("train", 30, loss=2.0)
    assert steps(path) == [("train", 10), ("heldout", 10), ("train", 20), ("heldout", 20), ("train", 30)]
    assert read_metrics(path)[-1]["loss"] == 2.0


def test_a_line_that_a_kill_cut_off_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path, step=0) as metrics:
        metrics.write("train", 10, loss=1.0)
    with path.open("a") as file:
        file.write('{"kind": "train", "st')
    assert steps(path) == [("train", 10)]
    with MetricsFile(path, step=10) as metrics:
        metrics.write("train", 20, loss=1.0)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [10, 20]


def test_a_new_run_begins_an_empty_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for _ in range(2):
        with MetricsFile(path, step=0) as metrics:
            metrics.write("train", 1, loss=1.0)
    assert steps(path) == [("train", 1)]


def test_a_line_is_readable_while_the_run_goes_on(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path, step=0) as metrics:
        metrics.write("train", 1, loss=1.0)
        assert steps(path) == [("train", 1)]


def test_what_json_cannot_say_is_refused(tmp_path):
    with MetricsFile(tmp_path / "metrics.jsonl", step=0) as metrics, pytest.raises(ValueError, match="JSON"):
        metrics.write("train", 1, loss=float("nan"))


def test_no_file_is_no_record(tmp_path):
    assert read_metrics(tmp_path / "metrics.jsonl") == []
