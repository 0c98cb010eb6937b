"""Which attention trains fastest here: timed once for a shape on a machine, then read from the user's cache.

A run keeps what was chosen, since another kernel gives other last bits (train/machine.py).
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from modicum.model import ModelConfig
from modicum.model.mask import Visibility
from modicum.model.scores import attend_blocks, attend_sdpa
from modicum.store import cache_folder, processor_name, write_json
from modicum.train.compiler import compile_errors

KERNEL = 0  # in place of a number of queries: PyTorch's own kernel
USUAL_BLOCK = 128  # won for most shapes where it was measured (docs/training-notes.md), and taken where nothing was
_CANDIDATES = (KERNEL, 128, 256)  # 64 ties with 128, and takes two to three times as long to compile
_ROUNDS = 5
_TOKENS = 4096  # at once, in rows
_DOCUMENTS = 5  # in a row, as packed text has them


@dataclass(frozen=True)
class AttentionShape:
    """What decides which attention is fastest: heads, key-value heads, head_dim, and tokens in a row."""

    heads: int
    groups: int
    width: int
    length: int

    @classmethod
    def of(cls, config: ModelConfig, length: int) -> "AttentionShape":
        """That of a model trained on rows of `length` tokens."""
        return cls(config.num_attention_heads, config.num_key_value_heads, config.head_dim, length)


def fastest_block(shape: AttentionShape, dtype: torch.dtype, threads: int, say: Callable[[str], None]) -> int:
    """Queries a block with which compiled attention, forward and backward, takes least time on this CPU; or KERNEL.

    Some ten seconds the first time. Where compiling fails, or the cache cannot be written, `say` is told why.
    """
    if shape.length <= min(block for block in _CANDIDATES if block):
        return KERNEL  # a single block is the whole square, which the kernel does without a compiler
    path, name = cache_folder() / "attention.json", _name(shape, dtype, threads)
    known = _known(path)
    if name not in known:
        say("measuring which attention is fastest here; later runs of this shape read it from the cache")
        try:
            known[name] = _measured(shape, dtype, threads)
        except compile_errors() as error:
            say(f"attention was not measured ({type(error).__name__}); taking blocks of {USUAL_BLOCK} queries")
            return USUAL_BLOCK
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, known)
        except OSError as error:
            say(f"{path}: {error.strerror}; what was measured is not kept for later runs")
    times = known[name]
    return int(min(times, key=lambda block: times[block]))


def _known(path: Path) -> dict[str, dict[str, float]]:
    """What was measured before: seconds by block, by name. What cannot be read is measured again."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    names = {str(block) for block in _CANDIDATES}
    whole = isinstance(found, dict) and all(isinstance(times, dict) and names >= set(times) for times in found.values())
    return found if whole else {}


def _name(shape: AttentionShape, dtype: torch.dtype, threads: int) -> str:
    heads = f"{shape.heads}/{shape.groups} heads of {shape.width}"
    machine = f"{processor_name()}, {threads} threads, torch {torch.__version__}"
    return f"{machine}: {shape.length} tokens, {heads}, {dtype}"


def _measured(shape: AttentionShape, dtype: torch.dtype, threads: int) -> dict[str, float]:
    """The least seconds of each candidate, which take turns."""
    passes = {str(block): _one_pass(shape, dtype, block) for block in _CANDIDATES if block < shape.length}
    seconds: dict[str, list[float]] = {name: [] for name in passes}
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for once in passes.values():  # compiles
            once()
        for _ in range(_ROUNDS):
            for name, once in passes.items():
                start = time.perf_counter()
                once()
                seconds[name].append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(before)
    return {name: min(found) for name, found in seconds.items()}


def _one_pass(shape: AttentionShape, dtype: torch.dtype, block: int) -> Callable[[], None]:
    """Forward and backward of one layer's attention over rows of several documents, on the CPU."""
    generator = torch.Generator().manual_seed(0)

    rows = max(1, _TOKENS // shape.length)

    def random(heads: int) -> Tensor:
        size = (rows, heads, shape.length, shape.width)
        return torch.randn(size, generator=generator).to(dtype).requires_grad_()

    q, k, v = random(shape.heads), random(shape.groups), random(shape.groups)
    slope = torch.randn(q.shape, generator=generator).to(dtype)
    places = torch.arange(shape.length).expand(rows, -1)
    documents = (places // -(-shape.length // _DOCUMENTS)).int()
    visibility = Visibility(0, shape.length, query_documents=documents, key_documents=documents)
    if block == KERNEL:
        mask = visibility.allowed(0, shape.length, q.device)

        def out() -> Tensor:
            return attend_sdpa(q, k, v, mask=mask)

    else:
        biases, seeing = visibility.biases(block, q.device)
        compiled = torch.compile(attend_blocks, dynamic=False)

        def out() -> Tensor:
            found: Tensor = compiled(q, k, v, biases=biases, seeing=seeing, block=block)
            return found

    def once() -> None:
        out().backward(slope)  # type: ignore[no-untyped-call]
        q.grad = k.grad = v.grad = None

    return once
