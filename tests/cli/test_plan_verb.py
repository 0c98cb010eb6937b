"""modicum plan: the table, the JSON, the refusal."""

import json

import pytest
from typer.testing import CliRunner

import modicum.cli.new
import modicum.cli.plan  # noqa: F401 (registers the verb)
from modicum.cli.app import app
from modicum.cli.plan_table import plan_lines
from modicum.recipe import load_recipe
from modicum.road.plan import plan


def test_the_table_says_what_a_run_costs(tiny):
    answer = CliRunner().invoke(app, ["plan", str(tiny()), "--no-measure"])
    assert answer.exit_code == 0
    for words in ("parameters", "tokens a parameter", "pretrain", "whole run", "optimizer", "checkpoints", "note: "):
        assert words in answer.stdout


def test_the_columns_are_aligned(tiny):
    lines = plan_lines(plan(load_recipe(tiny()), measure=False))
    start = lines.index("stages")
    table = lines[start + 1 : lines.index("", start)]
    header = table[0]
    edge = header.index("memory") + len("memory")
    rows = [line for line in table[1:] if line.startswith(("  pretrain", "  sft", "  whole"))]
    assert len(rows) == 3
    assert all(line[:edge].endswith("B") for line in rows)


def test_every_figure_as_json_with_an_override(tiny):
    answer = CliRunner().invoke(app, ["plan", str(tiny()), "--no-measure", "--json", "--set", "pretrain.steps=7"])
    found = json.loads(answer.stdout)
    assert found["tokens"] == 7 * 4 * 128
    assert found["memory"]["total"] == sum(
        found["memory"][part] for part in ("program", "weights", "gradients", "optimizer", "logits", "activations")
    )


@pytest.mark.parametrize("override", ["model.hidden_size=200000", "pretrain.batch_size=1000000"])
def test_what_cannot_fit_is_one_line_and_status_2(tiny, override):
    answer = CliRunner().invoke(app, ["plan", str(tiny()), "--no-measure", "--set", override])
    assert answer.exit_code == 2
    assert answer.stderr.count("error: ") == 1
