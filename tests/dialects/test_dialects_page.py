"""docs/dialects.md is followed from an empty directory: its programs, its recipe and its commands, in their order."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "dialects.md").read_text("utf-8")
STEP = re.compile(
    r"```(?P<kind>python|yaml)\n(?P<block>.*?)```|^    (?P<command>modicum [^\n]*)$", re.DOTALL | re.MULTILINE
)


def steps():
    """(kind, text) of every program, recipe and command of the page."""
    for found in re.finditer(STEP, PAGE):
        if found["kind"]:
            yield found["kind"], found["block"]
        else:
            yield "command", found["command"]


def test_the_page_has_commands_of_all_it_speaks_of():
    commands = [text for kind, text in steps() if kind == "command"]
    for dialect in ("cyberslm", "slm", "core", "hf"):
        assert any(f"--dialect {dialect} " in command for command in commands)
    assert {command.split()[1] for command in commands} == {
        "import", "export", "generate", "doctor", "new", "plan", "run", "chat",
    }  # fmt: skip


@pytest.mark.timeout(600)
def test_whoever_follows_the_page_gets_where_it_says(tmp_path):
    for kind, text in steps():
        if kind == "yaml":
            name = text.splitlines()[0].removeprefix("# ")
            (tmp_path / name).write_text(text)
            continue
        words = ["-c", text] if kind == "python" else ["-m", *shlex.split(text)]
        typed = "What is a port?\n/quit\n" if text.startswith("modicum chat") else ""
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, input=typed, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
    assert (tmp_path / "runs/on/report/index.html").exists()
