"""modicum quantize at the command line: a table or JSON, and exit status 2 for what its user can mend."""

import json

from typer.testing import CliRunner

from modicum.cli import quantize
from modicum.cli.app import app

assert quantize  # registers the verb


def run(*words):
    return CliRunner().invoke(app, ["quantize", *map(str, words)])


def test_the_table_has_both_sides_and_the_folder(checkpoint, text, heldout, tmp_path):
    ended = run(
        checkpoint, "--to", "int4", "--text", text, "--heldout", heldout, "--max-kl", "0.5", "--out", tmp_path / "out"
    )
    assert ended.exit_code == 0, ended.output
    for words in ("full precision", "bits per byte", "tokens/s", "KL divergence", "top-1 agreement", "of 4 bits"):
        assert words in ended.output
    assert "costs" in ended.output
    assert f"written: {tmp_path / 'out'}" in ended.output


def test_json_has_every_figure(checkpoint, heldout, tmp_path):
    ended = run(checkpoint, "--to", "int8", "--heldout", heldout, "--out", tmp_path / "out", "--json")
    found = json.loads(ended.stdout)
    assert found["cost"].keys() == {"disk_bytes", "load_seconds", "tokens_per_second", "memory_bytes"}
    assert found["judged"]["quality"]["mean_kl"] <= found["limits"]["mean_kl"]


def test_what_cannot_be_is_said_in_a_line(checkpoint, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for words in (["--max-kl", "-1"], ["--tune", "5"]):
        ended = run(checkpoint, "--to", "int4", "--out", tmp_path / "out", *words)
        assert (ended.exit_code, ended.output.count("\n")) == (2, 1), ended.output
    assert run(checkpoint, "--to", "int4", "--out", tmp_path / "full").exit_code == 2
    assert run(tmp_path / "none", "--to", "int8", "--out", tmp_path / "out").exit_code == 2
