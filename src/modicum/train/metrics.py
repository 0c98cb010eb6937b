"""metrics.jsonl: one JSON object a line, in the order of the updates, each step at most once a kind.

Kinds: "train" (means since the line before), "heldout", "spike". Losses are nats a token.
"""

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from modicum.store import write_text


class MetricsFile:
    """Appends records. Opening it for a run that goes on drops what stands after the step it goes on from.

    Without a path nothing is written: of many ranks only the first one keeps the file.
    """

    def __init__(self, path: Path | None, *, step: int) -> None:
        self._file = None
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [record for record in read_metrics(path) if record["step"] <= step] if step else []
        write_text(path, "".join(_line(record) for record in kept))
        self._file = path.open("a", encoding="utf-8")

    def write(self, kind: str, step: int, **values: Any) -> None:
        """One record; it is in the system's hands when this returns. Raises ValueError for NaN or infinity."""
        if self._file is not None:
            self._file.write(_line({"kind": kind, "step": step, **values}))
            self._file.flush()

    def sync(self) -> None:
        """Make sure that the lines so far survive a power cut: a checkpoint may not know more than this file."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl; [] when there is none. A last line that a kill cut off is left out."""
    if not path.exists():
        return []
    lines = path.read_text("utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
