"""How fast one trains here, and in how much memory: modicum beside a peer on the same network and the same tokens."""

from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from modicum.bench.result import Bench, Row
from modicum.bench.systems import Ours, Peer
from modicum.bench.turns import Say, take_turns
from modicum.model import ModelConfig, parameters_by_part, training_flops_per_token
from modicum.road.machine import describe_machine, usable_cores
from modicum.train.plan import silent

_WORKER = "modicum.bench.training_worker"
_PEAK = "modicum.bench.matrix_peak"


def bench_training(
    config: ModelConfig,
    *,
    rows: int,
    length: int,
    peers: Sequence[Peer],
    ours: Ours = Ours(),  # noqa: B008 (it is frozen)
    rounds: int = 3,
    updates: int = 4,
    say: Say = silent,
) -> Bench:
    """Whole updates (forward, backward, clipping, AdamW) of rows x length random tokens, a document a row.

    In each round and process one update is made that does not count (it compiles and finds its memory), then `updates`
    that do. Raises UserError when a peer's package is missing, or memory runs out.
    """
    shape = {"config": asdict(config), "rows": rows, "length": length, "updates": updates}
    orders: dict[str, dict[str, Any]] = {"modicum": {**shape, "ours": asdict(ours)}}
    for peer in peers:
        orders[f"{peer.name} {peer.words}"] = {**shape, "peer": asdict(peer)}
    (peak,) = take_turns(_PEAK, {"matrix peak": {"hidden": config.hidden_size}}, rounds=1, say=say)["matrix peak"]
    answers = take_turns(_WORKER, orders, rounds=rounds, say=say)
    flops = training_flops_per_token(config, length)
    return Bench(
        f"training updates of {rows} x {length} tokens, {parameters_by_part(config).total:,} parameters, "
        f"vocabulary {config.vocab_size:,}; medians of {rounds} rounds",
        tuple(_row(name, given, rows * length, flops, peak["gflops"]) for name, given in answers.items()),
        {"line": describe_machine().line(), "threads": usable_cores(), "matrix_gflops": peak["gflops"]},
    )


def _row(name: str, answers: Sequence[dict[str, Any]], tokens: int, flops: int, peak: dict[str, float]) -> Row:
    speeds = [tokens / median(answer["seconds"]) for answer in answers]
    gflops = median(speeds) * flops / 1e9
    first = answers[0]
    return Row(
        system=name.split()[0],
        mode=first["mode"],
        tokens_per_s=median(speeds),
        low=min(speeds),
        high=max(speeds),
        gflops=gflops,
        share_of_peak=gflops / peak[first["dtype"]],
        peak_rss_mb=median(answer["peak_rss_mb"] for answer in answers),
    )
