"""Broken input of every kind: one clear line, exit status 2, and no half-written stage."""

import json
import os
import subprocess
import sys

import pytest


def modicum(*arguments, cwd=None):
    command = [sys.executable, "-m", "modicum", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)


def refused(answer, *expected):
    """The error lines of an answer that is the user's to mend, each expected text in one of them."""
    lines = [line for line in answer.stderr.splitlines() if line.startswith("error: ")]
    assert answer.returncode == 2, answer.stderr
    assert "Traceback" not in answer.stderr
    for text in expected:
        assert any(text in line for line in lines), (text, lines)
    return lines


def leftovers(folder):
    """Stages that look finished, and half-written files, below a run's folder."""
    finished = {path.parent.name for path in folder.glob("*/manifest.json")}
    partial = [path for path in folder.rglob(".tmp-*")]
    return finished, partial


def test_a_missing_file_is_named(tiny):
    path = tiny(corpus={"sources": [{"name": "text", "path": "nowhere.jsonl"}]})
    (line,) = refused(modicum("run", path), "corpus.sources.0.path: no such file or folder")
    assert "nowhere.jsonl" in line


def test_bad_yaml_is_named_with_its_line(tiny):
    path = tiny()
    path.write_text("name: x\ncorpus: [\n")
    (line,) = refused(modicum("run", path), "recipe.yaml:3")
    assert "not valid YAML" in line


def test_an_unknown_key_is_named_with_the_nearest(tiny):
    assert (
        len(refused(modicum("run", tiny(pretrain={"step": 3})), "pretrain.step: unknown key; did you mean steps?")) == 1
    )


def test_impossible_heads_are_named(tiny):
    assert len(refused(modicum("run", tiny(model={"num_attention_heads": 5})), "does not divide hidden_size 32")) == 1


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("empty folder", "empty"), ("not UTF-8", "latin.txt"), ("one document", "document"), ("bad line", "text.jsonl:2")],
)
def test_a_corpus_that_cannot_be_used_leaves_no_stage_behind(tiny, tmp_path, kind, expected):
    path = tiny()
    if kind == "empty folder":
        (tmp_path / "empty").mkdir()
        path = tiny(corpus={"sources": [{"name": "text", "path": "empty"}]})
    elif kind == "not UTF-8":
        (tmp_path / "latin.txt").write_bytes(b"caf\xe9 " * 40)
        path = tiny(corpus={"sources": [{"name": "text", "path": "latin.txt"}]})
    elif kind == "one document":
        (tmp_path / "one.txt").write_text("A single document, and nothing beside it that could be held out. " * 4)
        path = tiny(corpus={"sources": [{"name": "text", "path": "one.txt"}]})
    else:
        (tmp_path / "text.jsonl").write_text('{"text": "fine"}\n{"text": broken\n')
    assert len(refused(modicum("run", path), expected)) == 1
    finished, partial = leftovers(tmp_path / "runs" / "tiny")
    assert not finished
    assert not partial
    assert not (tmp_path / "runs" / "tiny" / "corpus" / "text").exists()


def test_a_truncated_checkpoint_is_named_and_nothing_is_built_on_it(tiny, tmp_path):
    path = tiny()
    assert modicum("run", path, "--until", "pretrain").returncode == 0
    weights = tmp_path / "runs/tiny/pretrain/checkpoints/last/model.safetensors"
    with weights.open("r+b") as file:
        file.truncate(1000)
    refused(modicum("run", path), "model.safetensors: damaged")
    finished, partial = leftovers(tmp_path / "runs" / "tiny")
    assert "sft" not in finished
    assert not partial


def test_a_tokenizer_that_changed_under_a_trained_model_is_refused(tiny):
    path = tiny(sft=None)
    assert modicum("run", path, "--until", "pretrain").returncode == 0
    answer = modicum("run", path, "--until", "pretrain", "--set", "tokenizer.vocab_size=640")
    refused(answer, "tokenizer")
    assert modicum("run", path, "--until", "pretrain").returncode == 0


def test_a_tokenizer_file_that_was_edited_in_the_run_is_refused(tiny, tmp_path):
    path = tiny(sft=None)
    assert modicum("run", path, "--until", "pretrain").returncode == 0
    file = tmp_path / "runs/tiny/tokenizer/files/tokenizer.json"
    definition = json.loads(file.read_text())
    reserved = next(token for token in definition["added_tokens"] if token["content"] == "<|reserved_3|>")
    definition["model"]["vocab"]["<|other|>"] = definition["model"]["vocab"].pop("<|reserved_3|>")
    reserved["content"] = "<|other|>"
    file.write_text(json.dumps(definition))
    refused(modicum("run", path, "--until", "pretrain"), "tokenizer")


@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="mounting a small file system needs root")
@pytest.mark.parametrize("size", ["100k", "700k"])
def test_a_full_disk_is_told_and_leaves_no_half_written_stage(tiny, tmp_path, size):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk], check=False).returncode:
        pytest.skip("this container does not let root mount")
    try:
        path = tiny(output="disk", sft=None, pretrain={"keep_last": 9, "steps": 40, "checkpoint_every_steps": 2})
        answer = modicum("run", path)
        assert answer.returncode == 2, answer.stderr
        assert "Traceback" not in answer.stderr
        assert any(
            "space" in line or "disk" in line for line in answer.stderr.splitlines() if line.startswith("error: ")
        )
        _, partial = leftovers(disk / "tiny")
        assert not partial
    finally:
        subprocess.run(["umount", disk], check=True)
