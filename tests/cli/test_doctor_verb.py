"""modicum doctor: what it prints, as text and as JSON, and how it ends."""

import json

import pytest
from typer.testing import CliRunner

import modicum.cli.doctor  # registers the verb
import modicum.cli.new  # noqa: F401 (typer drops the verb's name when there is only one)
from modicum.cli.app import app
from modicum.cli.examination import marked_text
from modicum.doctor import examine as room
from modicum.doctor.chat import MarkedConversation
from modicum.doctor.finding import Finding

FINE = Finding("causality", "ok", "nothing [bold]leaks[/bold]")
YOURS = Finding("file hashes", "failed", "model.safetensors: damaged", yours=True)
OURS = Finding("cache against full", "failed", "off by one")
TALK = MarkedConversation(
    "talk.jsonl:1", [("<|im_start|>user\nHello [red]?<|im_end|>\n", False), ("Hi.<|im_end|>", True)]
)


def doctor(monkeypatch, items, *arguments):
    monkeypatch.setattr(room, "examine", lambda _: iter(items))
    return CliRunner().invoke(app, ["doctor", *arguments])


@pytest.mark.parametrize(("items", "status"), [([FINE], 0), ([FINE, YOURS], 2), ([YOURS, OURS], 1)])
def test_the_exit_status_says_whose_fault_it_is(monkeypatch, items, status):
    assert doctor(monkeypatch, items).exit_code == status


def test_each_finding_is_one_line_and_nothing_in_it_is_markup(monkeypatch):
    lines = doctor(monkeypatch, [FINE, YOURS]).stdout.splitlines()
    assert lines == [
        "ok     causality: nothing [bold]leaks[/bold]",
        "failed file hashes: model.safetensors: damaged",
    ]


def test_what_is_supervised_shows_without_colours(monkeypatch):
    out = doctor(monkeypatch, [TALK]).stdout
    assert "talk.jsonl:1" in out
    assert "Hello [red]?<|im_end|>" in out
    assert "⟦Hi.<|im_end|>⟧" in out
    assert marked_text(TALK).plain.endswith("Hello [red]?<|im_end|>\n  ⟦Hi.<|im_end|>⟧")


def test_the_findings_as_json(monkeypatch):
    answer = doctor(monkeypatch, [FINE, YOURS, TALK], "--json")
    found = json.loads(answer.stdout)
    assert [finding["name"] for finding in found["findings"]] == ["causality", "file hashes"]
    assert found["conversations"][0]["pieces"][1] == ["Hi.<|im_end|>", True]
    assert (found["exit_status"], answer.exit_code) == (2, 2)


def test_a_target_that_is_not_there_is_one_line(tmp_path):
    answer = CliRunner().invoke(app, ["doctor", str(tmp_path / "absent.yaml")])
    assert answer.exit_code == 2
    assert "no such recipe" in answer.stderr
