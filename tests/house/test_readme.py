"""The README's commands are run, the long ones shrunk; `make test` itself and `make quickstart` are left out."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")


def commands():
    """Every `modicum ...` line of the README's indented blocks, comments cut off."""
    lines = re.findall(r"^    (modicum [^\n#`]+)", README, flags=re.MULTILINE)
    return [line.strip() for line in lines]


SHRINK = [
    "--set", "output={runs}",
    "--set", "model.preset=nano", "--set", "model.max_position_embeddings=256",
    "--set", "pretrain.steps=3", "--set", "pretrain.sequence_length=64", "--set", "pretrain.batch_size=2",
    "--set", "pretrain.compile=off", "--set", "sft.compile=off", "--set", "sft.epochs=0.01",
    "--set", "sft.sequence_length=128", "--set", "evaluate.prompts=2", "--set", "evaluate.max_new_tokens=4",
    "--set", "evaluate.heldout_tokens=1000",
]  # fmt: skip


def test_the_readme_starts_with_the_two_commands():
    first_screen = "\n".join(README.splitlines()[:40])
    assert "make quickstart" in first_screen
    assert "make test" in first_screen


def test_the_readme_shows_commands_of_every_verb_family():
    shown = {command.split()[1] for command in commands()}
    assert {"new", "plan", "run", "chat", "generate", "doctor"} <= shown


@pytest.mark.timeout(900)
def test_the_commands_of_the_readme_do_what_they_say(tmp_path):
    runs = tmp_path / "runs"
    shrink = [part.format(runs=runs) for part in SHRINK]
    for command in commands():
        words = shlex.split(command.replace("runs/quickstart", str(runs / "quickstart")))
        if words[1] in ("plan", "run", "prepare", "pretrain", "sft", "evaluate", "report"):
            words += shrink
        if words[1] == "plan":
            words.append("--no-measure")
        typed = "What is CWE-79?\n/quit\n" if words[1] == "chat" else ""
        answer = subprocess.run(
            [sys.executable, "-m", "modicum", *words[1:]],
            cwd=tmp_path if words[1] == "new" else ROOT,
            input=typed,
            capture_output=True,
            text=True,
            check=False,
        )
        assert answer.returncode == 0, (command, answer.stderr)


def test_every_verb_of_the_table_exists_and_every_verb_is_in_the_table():
    answer = subprocess.run([sys.executable, "-m", "modicum", "--help"], capture_output=True, text=True, check=True)
    listed = set(re.findall(r"^\| `modicum (\w+)", README, flags=re.MULTILINE))
    # a verb stands first in its line of the list, behind the frame
    known = set(re.findall(r"^[^\w\n-]+([a-z]+)  ", answer.stdout, flags=re.MULTILINE))
    assert listed == known


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_quickstart_keeps_its_promise_of_time_and_memory(tmp_path):
    command = [sys.executable, "-m", "modicum", "run", "recipes/quickstart.yaml", "--set", f"output={tmp_path}"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    assert "held-out bits per byte: untrained" in answer.stdout
    manifests = [json.loads(path.read_text()) for path in (tmp_path / "quickstart").glob("*/manifest.json")]
    assert len(manifests) == 7
    assert sum(manifest["wall_seconds"] for manifest in manifests) < 20 * 60
    assert max(manifest["peak_memory_mb"] for manifest in manifests) < 4000
