"""What onnxruntime makes of an ONNX file: asked in a process of its own, which a faulty file may end."""

import json
import signal
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from modicum.exchange import onnx_child
from modicum.exchange.children import limit_seconds, passing_folder, run_child
from modicum.exchange.onnx_nodes import INSTALL
from modicum.exchange.parity import Ids
from modicum.store import UserError


@dataclass(frozen=True)
class Run:
    """Rows of ids (B, T) with a mask (B, T) that is 0 at padding; cuts: where the pass is taken up with the cache."""

    ids: NDArray[np.int64]
    mask: NDArray[np.int64]
    cuts: tuple[int, ...] = ()

    @classmethod
    def alone(cls, prompt: Ids, cuts: tuple[int, ...] = ()) -> "Run":
        """One prompt (T,), without padding."""
        return cls(prompt[None], np.ones((1, len(prompt)), dtype=np.int64), cuts)


@dataclass(frozen=True)
class OnnxAnswer:
    """inputs and outputs: name to [type, shape]; logits: (B, T, V) float32 of each run; greedy: how each text begun
    goes on. The speed is that of the last of those; the memory what loading and they took."""

    inputs: dict[str, list[Any]]
    outputs: dict[str, list[Any]]
    load_seconds: float
    tokens_per_second: float
    memory_bytes: int
    logits: list[NDArray[np.float32]]
    greedy: list[list[int]]


def check_runtime() -> None:
    """Raises UserError with the pip line where onnxruntime is not installed."""
    if find_spec("onnxruntime") is None:
        raise UserError(f"an ONNX file is proven in onnxruntime, and it is not installed: {INSTALL}")


def ask_onnx(
    model: Path,
    *,
    name: str,
    runs: Sequence[Run] = (),
    begun: Iterable[Iterable[int]] = (),
    steps: int = 0,
    limit: float | None = None,
    work: Path | None = None,
) -> OnnxAnswer:
    """Load `model` in onnxruntime on the CPU, go on from the texts `begun`, and make the `runs`.

    Raises UserError, beginning with `name`, in onnxruntime's own words where it refuses the file, crashes, or takes
    longer than `limit` seconds (without it, what such work may take). work: a folder with room for the logits; without
    it, where the system puts passing files.
    """
    request: dict[str, Any] = {
        "model": str(model),
        "threads": torch.get_num_threads(),
        "runs": [{"ids": run.ids.tolist(), "mask": run.mask.tolist(), "cuts": run.cuts} for run in runs],
        "begun": [list(map(int, text)) for text in begun],
        "steps": steps,
    }
    size = sum(one.stat().st_size for one in model.parent.iterdir())
    tokens = sum(run.ids.size for run in runs) + sum(len(text) + steps for text in request["begun"])
    with passing_folder(work) as folder:
        (folder / "request.json").write_text(json.dumps(request), "utf-8")
        limit = limit or limit_seconds(size, tokens)
        ended = run_child(onnx_child.__file__, [folder], name=name, runtime="onnxruntime", limit=limit)
        if ended.returncode != 0:
            raise UserError(f"{name}: {_fault(ended)}")
        facts: dict[str, Any] = json.loads((folder / "facts.json").read_text("utf-8"))
        # mapped, so that a large vocabulary's need no memory; they stay readable when their names are gone
        logits = [np.load(folder / f"logits-{number}.npy", mmap_mode="c") for number in range(len(runs))]
        greedy = json.loads((folder / "greedy.json").read_text("utf-8"))
    return OnnxAnswer(**facts, logits=logits, greedy=greedy)


def _fault(ended: subprocess.CompletedProcess[bytes]) -> str:
    """How the process ended, and its last line."""
    if ended.returncode < 0:
        return f"onnxruntime crashed on it ({signal.Signals(-ended.returncode).name})"
    lines = ended.stderr.decode("utf-8", "replace").strip().splitlines()
    return f"onnxruntime does not run it\n  {lines[-1][:600]}" if lines else "onnxruntime failed without a word"
