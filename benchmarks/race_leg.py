"""One leg of the race: one system learns for a given time and leaves snapshots of its weights. Order on stdin."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from modicum.bench.systems import Learner, Ours, Peer
from modicum.bench.turns import take_order
from modicum.data import Loader, WindowRows, open_shards
from modicum.model import ModelConfig
from modicum.store import peak_memory_bytes
from modicum.train import Schedule

# A run whose end is a time has no number of updates; its schedule is read at the share of the time that is over.
PARTS = 1_000_000


def race(order: dict[str, Any]) -> dict[str, Any]:
    """The points of the learning curve: seconds on the clock, updates, tokens, training loss since the last point.

    order: config; `ours` or `peer`; schedule; shards, tokenizer_hash, rows, length, seed; `seconds`, or `updates` where
    the machine is not quiet; points (how many snapshots); out (their folder). The clock starts when all packages are
    imported, before the network is built, includes compiling, and stands still while a snapshot is written.
    """
    rows = WindowRows(
        open_shards(Path(order["shards"]), tokenizer_hash=order["tokenizer_hash"]),
        sequence_length=order["length"],
        seed=order["seed"],
        separate_documents="ours" in order,
    )
    batches, config = Loader(rows, batch_size=order["rows"]), ModelConfig(**order["config"])
    system = Ours.from_plain(order["ours"]) if "ours" in order else Peer(**order["peer"])
    if isinstance(system, Peer):
        system.load(config)
    started = time.perf_counter()
    with ExitStack() as settings:
        learner = system.learner(config, order["length"], settings)
        points = list(_learn(learner, batches, order, started))
    return {
        "mode": learner.mode,
        "points": points,
        "peak_rss_mb": peak_memory_bytes() / 1e6,
        "said": f"{points[-1]['tokens'] / points[-1]['seconds']:,.0f} tokens/s, training loss {points[-1]['loss']:.3f}",
    }


def _learn(learner: Learner, batches: Loader, order: dict[str, Any], started: float) -> Iterator[dict[str, Any]]:
    schedule, out = Schedule(**order["schedule"]), Path(order["out"])
    tokens_an_update = order["rows"] * order["length"]
    step = point = 0
    written = 0.0
    losses: list[float] = []
    ready = 0.0
    while True:
        now = time.perf_counter() - started - written
        if step == 1:
            ready = now
        done = step / order["updates"] if order.get("updates") else now / order["seconds"]
        if losses and done >= (point + 1) / order["points"]:
            path = out / f"{point:03}.safetensors"
            save_file({name: weight.contiguous() for name, weight in learner.weights().items()}, path)
            loss = sum(losses) / len(losses)
            yield {"seconds": now, "updates": step, "tokens": step * tokens_an_update, "loss": loss, "file": path.name}
            point, losses = point + 1, []
            written = time.perf_counter() - started - now
        if done >= 1:
            return
        learned = done if order.get("updates") else (now - ready) / (order["seconds"] - ready) if step else 0.0
        losses.append(learner.update(next(batches), schedule.rate(int(learned * PARTS), PARTS)))
        step += 1


if __name__ == "__main__":
    take_order(race)
