"""How fast one trains here, and in how much memory: modicum beside a peer on the same network and the same tokens."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal

from modicum.bench.result import Bench, Row
from modicum.bench.turns import Say, take_turns
from modicum.model import ModelConfig, parameters_by_part
from modicum.road.machine import describe_machine, usable_cores
from modicum.road.sizes import training_flops_per_token
from modicum.train.plan import silent

_WORKER = "modicum.bench.training_worker"
_PEAK = "modicum.bench.matrix_peak"

Dtype = Literal["bfloat16", "float32"]


@dataclass(frozen=True)
class Peer:
    """transformers' Llama (or Qwen3 with QK-norm) of the same sizes, as its users train it: AdamW, fp32 weights,
    autocast where the dtype is bfloat16. our_allocator: with the allocator settings that modicum makes for itself."""

    mode: Literal["eager", "compile"] = "compile"
    dtype: Dtype = "bfloat16"
    our_allocator: bool = False

    @property
    def words(self) -> str:
        return f"{self.dtype} {self.mode}" + (", our allocator settings" if self.our_allocator else "")


def bench_training(
    config: ModelConfig,
    *,
    rows: int,
    length: int,
    peers: Sequence[Peer],
    dtype: Literal["auto", "bfloat16", "float32"] = "auto",
    activation_checkpointing: bool = False,
    rounds: int = 3,
    updates: int = 4,
    say: Say = silent,
) -> Bench:
    """Whole updates (forward, backward, clipping, AdamW) of rows x length random tokens, a document a row.

    In each round and process one update is made that does not count (it compiles and finds its memory), then `updates`
    that do. Raises UserError when a peer's package is missing, or memory runs out.
    """
    shape = {"config": asdict(config), "rows": rows, "length": length, "updates": updates}
    ours = {"system": "modicum", "dtype": dtype, "activation_checkpointing": activation_checkpointing}
    orders: dict[str, dict[str, Any]] = {"modicum": {**shape, **ours}}
    for peer in peers:
        orders[f"transformers {peer.words}"] = {**shape, "system": "transformers", **asdict(peer)}
    (peak,) = take_turns(_PEAK, {"matrix peak": {"hidden": config.hidden_size}}, rounds=1, say=say)["matrix peak"]
    answers = take_turns(_WORKER, orders, rounds=rounds, say=say)
    flops = training_flops_per_token(config, length)
    return Bench(
        f"training updates of {rows} x {length} tokens, {parameters_by_part(config).total:,} parameters, "
        f"vocabulary {config.vocab_size:,}; medians of {rounds} rounds",
        tuple(_row(given, rows * length, flops, peak["gflops"]) for given in answers.values()),
        {"line": describe_machine().line(), "threads": usable_cores(), "matrix_gflops": peak["gflops"]},
    )


def _row(answers: Sequence[dict[str, Any]], tokens: int, flops: int, peak: dict[str, float]) -> Row:
    speeds = [tokens / median(answer["seconds"]) for answer in answers]
    gflops = median(speeds) * flops / 1e9
    first = answers[0]
    return Row(
        system=first["system"],
        mode=first["mode"],
        tokens_per_s=median(speeds),
        low=min(speeds),
        high=max(speeds),
        gflops=gflops,
        share_of_peak=gflops / peak[first["dtype"]],
        peak_rss_mb=median(answer["peak_rss_mb"] for answer in answers),
    )
