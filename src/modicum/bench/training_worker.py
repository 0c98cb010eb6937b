"""The process that measures one system's training updates; reads its order from standard input, prints one line."""

import time
from contextlib import ExitStack
from statistics import median
from typing import Any

import torch

from modicum.bench.systems import Ours, Peer
from modicum.bench.turns import take_order
from modicum.data import Batch
from modicum.model import ModelConfig
from modicum.store import peak_memory_bytes

_RATE = 1e-4


def measure(order: dict[str, Any]) -> dict[str, Any]:
    """mode, dtype, the seconds of each update that counts, and the peak of resident memory.

    order: config, rows, length, updates; and `ours` or `peer`, the fields of Ours or Peer.
    """
    config = ModelConfig(**order["config"])
    system = Ours.from_plain(order["ours"]) if "ours" in order else Peer(**order["peer"])
    batch = _batch(config, order["rows"], order["length"])
    seconds = []
    with ExitStack() as settings:
        learner = system.learner(config, order["length"], settings)
        learner.update(batch, _RATE)
        for _ in range(order["updates"]):
            start = time.perf_counter()
            learner.update(batch, _RATE)
            seconds.append(time.perf_counter() - start)
    peak = peak_memory_bytes() / 1e6
    speed = batch.documents.numel() / median(seconds)
    return {
        "mode": learner.mode,
        "dtype": learner.dtype,
        "seconds": seconds,
        "peak_rss_mb": peak,
        "said": f"{speed:,.0f} tokens/s, {peak:,.0f} MB",
    }


def _batch(config: ModelConfig, rows: int, length: int) -> Batch:
    """Random tokens, one document a row: the peer knows no borders of documents."""
    ids = torch.randint(config.vocab_size, (rows, length + 1), generator=torch.Generator().manual_seed(0))
    supervised = torch.ones(rows, length + 1, dtype=torch.bool)
    supervised[:, 0] = False
    positions = torch.arange(length).expand(rows, length).contiguous()
    return Batch(ids, positions, torch.zeros(rows, length, dtype=torch.int32), supervised)


if __name__ == "__main__":
    take_order(measure)
