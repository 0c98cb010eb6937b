"""Runs of a directory for the page: which there are, their curves as they grow, and samples of what they say."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from modicum.serve.errors import ApiError

_STAGES = ("pretrain", "sft")
_AT_ONCE = 4 << 20  # bytes of a metrics.jsonl in one response; the client asks again for more


class Run(TypedDict):
    name: str
    stages: list[str]
    checkpoints: dict[str, list[str]]
    has_samples: bool
    changed: float


class RunList(TypedDict):
    runs: list[Run]


class Curve(TypedDict):
    """records: lines of metrics.jsonl. cursor: what to ask with next. again: whether these begin anew, because the file
    was replaced. more: whether there is more already."""

    records: list[dict[str, Any]]
    cursor: str
    again: bool
    more: bool


class Samples(TypedDict):
    samples: list[dict[str, Any]]


class Runs:
    """The runs below one directory. Names come from clients, so only those that a listing shows are ever opened."""

    def __init__(self, root: Path) -> None:
        self._root = root.resolve()  # "." has no name

    def all(self) -> RunList:
        """Every folder with the curves of at least one training stage, the newest first."""
        runs: list[Run] = []
        for name, folder in self._folders().items():
            stages = [stage for stage in _STAGES if (folder / stage / "metrics.jsonl").is_file()]
            if stages:
                changed = max((folder / stage / "metrics.jsonl").stat().st_mtime for stage in stages)
                checkpoints = {stage: _checkpoints(folder / stage) for stage in stages}
                found = (folder / "evaluate" / "results.json").is_file()
                run: Run = {
                    "name": name,
                    "stages": stages,
                    "checkpoints": checkpoints,
                    "has_samples": found,
                    "changed": changed,
                }
                runs.append(run)
        return {"runs": sorted(runs, key=lambda run: -run["changed"])}

    def curve(self, name: str, stage: str, cursor: str) -> Curve:
        """What stands in a stage's metrics.jsonl behind the cursor ("" for all). Raises ApiError 404."""
        path = self._folder(name) / stage / "metrics.jsonl"
        if stage not in _STAGES or not path.is_file():
            raise ApiError(404, "no such stage")
        with path.open("rb") as file:
            found = path.stat()
            # a run that goes on replaces the file: then everything is new
            same, _, place = cursor.partition("-")
            ours = same == str(found.st_ino) and place.isdecimal() and len(place) <= 15
            start = int(place) if ours and int(place) <= found.st_size else 0
            file.seek(max(0, start - 1))
            if start and file.read(1) != b"\n":  # nobody was given this place
                start = file.seek(0)
            again = start == 0
            data = file.read(_AT_ONCE)
        whole = data[: data.rfind(b"\n") + 1]
        records = [json.loads(line) for line in whole.splitlines()]
        end = start + len(whole)
        return {
            "records": records,
            "cursor": f"{found.st_ino}-{end}",
            "again": again,
            "more": bool(whole) and end < found.st_size,
        }

    def samples(self, name: str) -> Samples:
        """What the evaluation had its models say. Raises ApiError 404."""
        path = self._folder(name) / "evaluate" / "results.json"
        if not path.is_file():
            raise ApiError(404, "no samples yet")
        return {"samples": json.loads(path.read_text("utf-8")).get("samples", [])}

    def _folder(self, name: str) -> Path:
        folder = self._folders().get(name)
        if folder is None:
            raise ApiError(404, "no such run")
        return folder

    def _folders(self) -> dict[str, Path]:
        def inside() -> Iterator[Path]:
            yield self._root
            yield from self._root.iterdir()

        return {
            path.name: path
            for path in inside()
            if path.is_dir() and not path.is_symlink() and not path.name.startswith(".")
        }


def _checkpoints(stage: Path) -> list[str]:
    return sorted(path.name for path in (stage / "checkpoints").glob("step-*") if path.is_dir())
