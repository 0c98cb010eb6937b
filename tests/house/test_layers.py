"""The rooms of the house import downwards only, and nothing heavy where it is not needed."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import modicum

ROOT = Path(modicum.__file__).parent
ROOMS = [
    "cli", "bench", "serve", "doctor", "road", "exchange", "quantize", "tune", "train", "evaluate", "generate",
    "dialects", "checkpoint", "model", "data", "tokenizer", "corpus", "recipe", "store",
]  # fmt: skip
FILES = sorted(path for path in ROOT.rglob("*.py") if path.parent != ROOT)


def imported_modules(path):
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the room's name out"
            yield node.module or ""


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_room_imports_only_from_rooms_below_it(path):
    room = path.relative_to(ROOT).parts[0]
    for module in imported_modules(path):
        parts = module.split(".")
        if parts[0] == "modicum" and len(parts) > 1 and parts[1] in ROOMS:
            assert ROOMS.index(parts[1]) >= ROOMS.index(room), f"{path.name} imports upwards: {module}"


def test_every_folder_is_a_room_of_the_list():
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == set(ROOMS)
    page = (ROOT.parents[1] / "ARCHITECTURE.md").read_text("utf-8")
    assert [name for name in ROOMS if f"`{name}/`" not in page] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_parity_oracle_is_never_imported_by_the_program(path):
    if path in (ROOT / "bench" / "systems.py", ROOT / "bench" / "decoding_worker.py"):
        return  # there it is the peer that we are measured against
    assert not any(module.split(".")[0] == "transformers" for module in imported_modules(path))


# Files of torch's own kind come in and go out in one place, which reads them as weights alone.
TORCH_FILES = ROOT / "exchange" / "torch_file.py"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_in_the_program_reads_a_pickle(path):
    text = path.read_text("utf-8")
    for forbidden in ("import pickle", "torch.load(", "torch.save(", "allow_pickle=True"):
        assert forbidden not in text or (path == TORCH_FILES and forbidden.startswith("torch."))


def test_a_torch_file_is_only_ever_read_as_weights_alone():
    calls = [node for node in ast.walk(ast.parse(TORCH_FILES.read_text("utf-8"))) if isinstance(node, ast.Call)]
    loads = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "load"]
    assert loads
    for call in loads:
        (value,) = (keyword.value for keyword in call.keywords if keyword.arg == "weights_only")
        assert isinstance(value, ast.Constant)
        assert value.value is True


def test_the_command_line_answers_help_without_loading_torch():
    script = (
        "import importlib, sys; from modicum.cli.app import VERBS;"
        "[importlib.import_module(f'modicum.cli.{name}') for name in VERBS]; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
