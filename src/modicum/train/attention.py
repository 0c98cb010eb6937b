"""Which attention trains fastest here: timed once for a shape on a machine, then read from the user's cache.

A run keeps what was chosen, since another kernel gives other last bits (train/machine.py).
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path

import torch

from modicum.model import ModelConfig, scores
from modicum.store import cache_folder, processor_flags, processor_name
from modicum.train import attention_child
from modicum.train.attention_child import KERNEL, candidates

USUAL_BLOCK = 128  # won for most shapes where it was measured (docs/training-notes.md), and taken where nothing was
_WORTH = 0.95  # of the usual block's time: what is not clearly faster is noise
_LIMIT_SECONDS = 600


@dataclass(frozen=True)
class AttentionShape:
    """What decides which attention is fastest: heads, key-value heads, head_dim, and tokens in a row."""

    heads: int
    groups: int
    width: int
    length: int

    @classmethod
    def of(cls, config: ModelConfig, length: int) -> "AttentionShape | None":
        """That of a model trained on rows of `length` tokens; None with dropout, which only PyTorch's kernel has."""
        if config.attention_dropout:
            return None
        return cls(config.num_attention_heads, config.num_key_value_heads, config.head_dim, length)


def fastest_block(shape: AttentionShape, dtype: torch.dtype, threads: int, say: Callable[[str], None]) -> int:
    """Queries a block with which compiled attention, forward and backward, takes least time on this CPU; or KERNEL.

    Measured in a process of its own, so that this one's peak of memory is its own: half a minute the first time. Where
    that fails, or the cache cannot be written, `say` is told why.
    """
    blocks = candidates(shape.length)
    if len(blocks) == 1:
        return KERNEL
    path = _place(shape, dtype, threads)
    times = None if path is None else _known(path, blocks)
    if times is None:
        say("measuring which attention is fastest here; later runs of this shape read it from the cache")
        try:
            times = _measured(shape, dtype, threads)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            say(f"attention was not measured ({error}); taking blocks of {USUAL_BLOCK} queries")
            return USUAL_BLOCK
        fault = "the cache has no place: XDG_CACHE_HOME names one" if path is None else _keep(path, times)
        if fault is not None:
            say(f"{fault}; what was measured is not kept for later runs")
    best = min(times, key=times.__getitem__)
    return best if times[best] < _WORTH * times[USUAL_BLOCK] else USUAL_BLOCK


def _place(shape: AttentionShape, dtype: torch.dtype, threads: int) -> Path | None:
    """The file for this shape, dtype, threads, machine and code; None for a user without a home."""
    code = [Path(str(module.__file__)).read_text("utf-8") for module in (scores, attention_child)]
    machine = [processor_name(), *sorted(processor_flags()), str(threads), torch.__version__]
    digest = hashlib.sha256("\0".join([str(shape), str(dtype), *machine, *code]).encode()).hexdigest()[:16]
    try:
        return cache_folder() / f"attention-{digest}.json"
    except RuntimeError:
        return None


def _known(path: Path, blocks: tuple[int, ...]) -> dict[int, float] | None:
    """Seconds by block as they were measured before; None where the file is not there, or not whole."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or found.keys() != {str(block) for block in blocks}:
        return None
    numbers = all(type(value) is float and isfinite(value) and value > 0 for value in found.values())
    return {block: found[str(block)] for block in blocks} if numbers else None


def _keep(path: Path, times: dict[int, float]) -> str | None:
    """Write the file, whole or not at all, whoever else does so at this moment; what went wrong."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".tmp-") as folder:
            made = Path(folder) / path.name
            made.write_text(json.dumps(times), "utf-8")
            os.replace(made, path)
    except OSError as error:
        return f"{path}: {error.strerror}"
    return None


def _measured(shape: AttentionShape, dtype: torch.dtype, threads: int) -> dict[int, float]:
    """The least seconds of each candidate. Raises RuntimeError with the last words of a process that failed."""
    order = {"shape": asdict(shape), "dtype": str(dtype).removeprefix("torch."), "threads": threads}
    done = subprocess.run(
        [sys.executable, "-m", attention_child.__name__],
        input=json.dumps(order),
        capture_output=True,
        text=True,
        check=False,
        timeout=_LIMIT_SECONDS,
    )
    if done.returncode:
        words = done.stderr.strip().splitlines()
        raise RuntimeError(words[-1][:200] if words else f"status {done.returncode}")
    return {int(block): seconds for block, seconds in json.loads(done.stdout.splitlines()[-1]).items()}
