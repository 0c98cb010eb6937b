"""The process that times attention for `attention.py`: an order on standard input, seconds by block on the output.

What it measures is what a run does: the same code, compiled, under the trainer's own settings.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from modicum.model.mask import Visibility
from modicum.model.scores import attend_blocks, attend_sdpa
from modicum.train.allocator import keep_freed_memory

KERNEL = 0  # in place of a number of queries: PyTorch's own kernel
_BLOCKS = (128, 256)  # 64 ties with 128, and takes two to three times as long to compile
_ROUNDS = 7
_TOKENS = 4096  # at once, in rows
_DOCUMENTS = 5  # in a row, as packed text has them


def candidates(length: int) -> tuple[int, ...]:
    """KERNEL, and the blocks shorter than a row: a single one would be the whole square, as in the kernel."""
    return (KERNEL, *(block for block in _BLOCKS if block < length))


def measured(heads: int, groups: int, width: int, length: int, dtype: torch.dtype) -> dict[int, float]:
    """The least seconds of each candidate's forward and backward pass; they take turns."""
    passes = {block: one_pass(heads, groups, width, length, dtype, block) for block in candidates(length)}
    seconds: dict[int, list[float]] = {block: [] for block in passes}
    for once in passes.values():  # compiles
        once()
    for _ in range(_ROUNDS):
        for block, once in passes.items():
            start = time.perf_counter()
            once()
            seconds[block].append(time.perf_counter() - start)
    return {block: min(found) for block, found in seconds.items()}


def one_pass(heads: int, groups: int, width: int, length: int, dtype: torch.dtype, block: int) -> Callable[[], None]:
    """Forward and backward of one layer's attention over rows of several documents, on the CPU."""
    generator = torch.Generator().manual_seed(0)
    rows = max(1, _TOKENS // length)

    def random(count: int) -> Tensor:
        return torch.randn((rows, count, length, width), generator=generator).to(dtype).requires_grad_()

    q, k, v = random(heads), random(groups), random(groups)
    slope = torch.randn(q.shape, generator=generator).to(dtype)
    places = torch.arange(length).expand(rows, -1)
    documents = (places // -(-length // _DOCUMENTS)).int()
    visibility = Visibility(0, length, query_documents=documents, key_documents=documents)
    if block == KERNEL:
        mask = visibility.allowed(0, length, q.device)
        kernel = torch.compile(attend_sdpa, dynamic=False)

        def out() -> Tensor:
            found: Tensor = kernel(q, k, v, mask=mask)
            return found

    else:
        biases, seeing = visibility.biases(block, q.device)
        blocks = torch.compile(attend_blocks, dynamic=False)

        def out() -> Tensor:
            found: Tensor = blocks(q, k, v, biases=biases, seeing=seeing, block=block)
            return found

    def once() -> None:
        out().backward(slope)  # type: ignore[no-untyped-call]
        q.grad = k.grad = v.grad = None

    return once


def main() -> None:
    order = json.load(sys.stdin)
    torch.set_num_threads(order["threads"])
    torch.use_deterministic_algorithms(True, warn_only=True)  # as the trainer does
    memory: Any = torch.utils.deterministic
    memory.fill_uninitialized_memory = False
    keep_freed_memory()
    print(json.dumps(measured(**order["shape"], dtype=getattr(torch, order["dtype"]))))


if __name__ == "__main__":
    main()
