"""Runs of a directory for the page: which there are, their curves as they grow, and samples of what they say."""

import json
import math
import os
from contextlib import suppress
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
    """records: lines of metrics.jsonl. damaged: how many lines among them are none and were left out. cursor: what to
    ask with next. again: whether these begin anew, because the file was replaced. more: whether there is more already.
    """

    records: list[dict[str, Any]]
    damaged: int
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
            with suppress(OSError):  # a run that is being removed
                runs += _run(name, folder)
        return {"runs": sorted(runs, key=lambda run: -run["changed"])}

    def curve(self, name: str, stage: str, cursor: str) -> Curve:
        """What stands in a stage's metrics.jsonl behind the cursor ("" for all); a last line that is still being
        written waits for the next time. Raises ApiError 404."""
        path = self._folder(name) / stage / "metrics.jsonl"
        if stage not in _STAGES or not path.is_file():
            raise ApiError(404, "no such stage")
        try:
            file = path.open("rb")
        except OSError:
            raise ApiError(404, "the stage's metrics.jsonl cannot be read") from None
        with file:
            found = os.fstat(file.fileno())
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
            records = [_record(line) for line in whole.split(b"\n")[:-1]]
            end = start + len(whole)
            if not whole and len(data) == _AT_ONCE:  # no line of ours is so long
                while (piece := file.readline(_AT_ONCE)) and not piece.endswith(b"\n"):
                    pass
                if piece:
                    records, end = [None], file.tell()
        return {
            "records": [record for record in records if record is not None],
            "damaged": records.count(None),
            "cursor": f"{found.st_ino}-{end}",
            "again": again,
            "more": start < end and end < found.st_size,
        }

    def samples(self, name: str) -> Samples:
        """What the evaluation had its models say. Raises ApiError 404."""
        path = self._folder(name) / "evaluate" / "results.json"
        if not path.is_file():
            raise ApiError(404, "no samples yet")
        try:
            found = _record(path.read_bytes())
        except OSError:
            found = None
        if found is None:
            raise ApiError(404, "the samples cannot be read: evaluate/results.json is damaged")
        samples = found.get("samples", [])
        return {"samples": [s for s in samples if isinstance(s, dict)] if isinstance(samples, list) else []}

    def _folder(self, name: str) -> Path:
        folder = self._folders().get(name)
        if folder is None:
            raise ApiError(404, "no such run")
        return folder

    def _folders(self) -> dict[str, Path]:
        try:
            inside = [self._root, *self._root.iterdir()]
        except OSError:  # the directory itself was removed
            return {}
        return {
            path.name: path
            for path in inside
            if path.is_dir() and not path.is_symlink() and not path.name.startswith(".")
        }


def _run(name: str, folder: Path) -> list[Run]:
    """The run in a folder, where there is one."""
    stages = [stage for stage in _STAGES if (folder / stage / "metrics.jsonl").is_file()]
    if not stages:
        return []
    run: Run = {
        "name": name,
        "stages": stages,
        "checkpoints": {stage: _checkpoints(folder / stage) for stage in stages},
        "has_samples": (folder / "evaluate" / "results.json").is_file(),
        "changed": max((folder / stage / "metrics.jsonl").stat().st_mtime for stage in stages),
    }
    return [run]


def _record(line: bytes) -> dict[str, Any] | None:
    """The JSON object that is written there, or None. What is no finite number becomes null, as JSON has none."""

    def number(text: str) -> float | None:
        return value if math.isfinite(value := float(text)) else None

    try:
        found = json.loads(line.decode("utf-8"), parse_float=number, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _checkpoints(stage: Path) -> list[str]:
    return sorted(path.name for path in (stage / "checkpoints").glob("step-*") if path.is_dir())
