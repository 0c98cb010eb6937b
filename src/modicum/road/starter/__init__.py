"""What `modicum new` copies: a commented recipe and a sample of permissively licensed text (see LICENSES.md there)."""

from pathlib import Path

from modicum.store import UserError, atomic_directory, write_bytes

_HERE = Path(__file__).parent
_FILES = {
    "recipe.yaml": "recipe.yaml",
    "LICENSES.md": "data/LICENSES.md",
    "corpus.jsonl.gz": "data/corpus.jsonl.gz",
    "instruct.jsonl.gz": "data/instruct.jsonl.gz",
    "eval.jsonl": "data/eval.jsonl",
}


def write_starter(folder: Path) -> list[Path]:
    """Create `folder` with recipe.yaml and data/; returns the files. Raises UserError when something lies there."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: exists and is not empty; name a new folder")
    if folder.is_dir():  # perhaps the one we stand in, which cannot be replaced
        _fill(folder)
    else:
        with atomic_directory(folder.resolve()) as work:
            _fill(work)
    return [folder / target for target in _FILES.values()]


def _fill(folder: Path) -> None:
    (folder / "data").mkdir()
    for name, target in _FILES.items():
        write_bytes(folder / target, (_HERE / name).read_bytes())
