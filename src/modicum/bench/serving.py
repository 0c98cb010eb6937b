"""How many users a server bears: modicum's beside llama.cpp's, on the same weights, with the same requests."""

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch

from modicum.bench import serving_llama
from modicum.bench.decoding import gguf_of
from modicum.bench.serving_load import Load, Mix, draw_requests
from modicum.bench.turns import Say, take_turns
from modicum.checkpoint import Checkpoint, load_checkpoint
from modicum.exchange.gguf_weights import Quant
from modicum.road.machine import describe_machine, usable_cores
from modicum.store import UserError
from modicum.train.plan import silent

_WORKER = "modicum.bench.serving_worker"
_WARM_TOKENS = 8
LIMIT_SECONDS = 900.0
USERS = (1, 4, 16, 64)
_LOADS = tuple(Load(users) for users in USERS)


@dataclass(frozen=True)
class ServeRow:
    """One system under one load. requests, errors and faults (their causes): of all rounds; the rest are medians of the
    rounds' figures (low and high: the slowest and fastest round's tokens_per_s).

    tokens_per_s: of all answers together. first_token: from the moment a request was due to its first piece of text;
    between_tokens: from one piece of an answer to the next; medians and percentiles of a round, in ms. A piece is a
    token, but where a character takes several (tokens_per_piece). ready_s: from the start of the process until it was
    ready. peak_rss_mb: its largest resident set, 10^6 bytes.
    """

    system: str
    mode: str
    load: str
    slots: int
    requests: int
    errors: int
    faults: dict[str, int]
    tokens_per_s: float
    low: float
    high: float
    first_token_ms: float
    first_token_p95_ms: float
    first_token_p99_ms: float
    between_tokens_ms: float
    between_tokens_p95_ms: float
    between_tokens_p99_ms: float
    tokens_per_piece: float
    ready_s: float
    peak_rss_mb: float

    @property
    def name(self) -> str:
        return f"{self.system} {self.mode}, {self.load}"


@dataclass(frozen=True)
class ServeBench:
    """rows: by load, ours first. what: what was measured, in words. machine: its line and threads."""

    what: str
    rows: tuple[ServeRow, ...]
    machine: dict[str, Any]

    @property
    def ratios(self) -> dict[str, dict[str, float]]:
        """Ours divided by the peer's under the same load: above 1 is faster in tokens_per_s, below 1 is better in all
        others. None where either had errors: what is not answered costs no time."""
        ours = {row.load: row for row in self.rows if row.system == "modicum"}
        return {
            figure: {
                row.name: getattr(ours[row.load], figure) / getattr(row, figure)
                for row in self.rows
                if row.system != "modicum" and not row.errors and not ours[row.load].errors
            }
            for figure in ("tokens_per_s", "first_token_ms", "between_tokens_ms", "ready_s", "peak_rss_mb")
        }

    def to_dict(self) -> dict[str, Any]:
        """The shape that every `modicum bench` verb prints with --json."""
        rows = [asdict(row) for row in self.rows]
        return {"what": self.what, "rows": rows, "ratios": self.ratios, "machine": self.machine}


def bench_serving(
    checkpoint: Path,
    *,
    loads: Sequence[Load] = _LOADS,
    mix: Mix | None = None,
    llama: bool = False,
    gguf: Quant | None = None,
    plain_attention: bool = False,
    requests: int | None = None,
    rounds: int = 3,
    seed: int = 0,
    limit_s: float = LIMIT_SECONDS,
    say: Say = silent,
) -> ServeBench:
    """`modicum serve` under each load, and beside it, with llama, llama.cpp's server on a GGUF file of the checkpoint.

    gguf: its number type; without it that which is nearest to the checkpoint's own. plain_attention: measure llama.cpp
    with it too, which answers faster after long prompts on some processors, and reads them slower. requests: of one
    turn; without it what the load takes. Each turn starts a server of its own, with the same threads, context and
    slots. limit_s: of one turn's load. Raises UserError when requests do not fit the context, a package is missing, or
    a server ends.
    """
    mix = mix or Mix()
    loaded = load_checkpoint(checkpoint)
    _check(mix, loaded)
    _check_requests(requests, loads)
    config, threads, tokenizer = loaded.config, usable_cores(), loaded.tokenizer
    ids = [number for number in range(tokenizer.vocab_size) if number not in tokenizer.special_ids]
    kind = gguf or nearest_type(loaded)
    # of a slot, and a little more: a model with many more positions would keep them for nothing
    context = min(config.max_position_embeddings, max(mix.prompt) + max(mix.answer) + 32)
    rows: list[ServeRow] = []
    with tempfile.TemporaryDirectory(prefix="modicum-") as place:
        file = gguf_of(loaded, kind, Path(place)) if llama else None
        for load in loads:
            count, slots = requests or load.requests(), load.slots()
            asked = draw_requests(count, mix, ids, start=tokenizer.bos_id, seed=seed, rate=load.rate)
            short = Mix(mix.prompt, (min(_WARM_TOKENS, *mix.answer),))
            warm = draw_requests(slots, short, ids, start=tokenizer.bos_id, seed=seed + 1)
            commands: dict[tuple[str, str], list[str]] = {
                ("modicum", _stored(loaded)): _ours(checkpoint, slots, context, count)
            }
            if file is not None:
                theirs = _theirs(file, slots, context, threads, load)
                commands["llama.cpp", kind] = [*theirs, "-1"]
                if plain_attention:
                    commands["llama.cpp", f"{kind} plain attention"] = [*theirs, "0"]
            shared = {
                "threads": threads,
                "ends": loaded.stop_ids,
                "warm": [asdict(one) for one in warm],
                "asked": [asdict(one) for one in asked],
                "users": load.users,
                "limit_s": limit_s,
            }
            orders = {" ".join(name): {**shared, "command": command} for name, command in commands.items()}
            answers = take_turns(_WORKER, orders, rounds=rounds, say=_after(load.words(), say))
            rows += [_row(*name, load, given) for name, given in zip(commands, answers.values(), strict=True)]
    alike = f"the first {mix.shared} shared" if mix.shared else "all different"
    return ServeBench(
        f"prompts of {_words(mix.prompt)} tokens ({alike}), "
        f"answers of {_words(mix.answer)}; {config.parameter_count():,} parameters, vocabulary {config.vocab_size:,}; "
        f"medians of {rounds} rounds",
        tuple(rows),
        {"line": describe_machine().line(), "threads": threads},
    )


def nearest_type(checkpoint: Checkpoint) -> Quant:
    """The number type of a GGUF file whose matrices take as many bits as the checkpoint's."""
    if checkpoint.rounded:
        return "q4_0" if 4 in checkpoint.rounded.values() else "q8_0"
    kinds: dict[torch.dtype, Quant] = {torch.bfloat16: "bf16", torch.float16: "f16"}
    return kinds.get(checkpoint.tensors["model.embed_tokens.weight"].dtype, "f32")


def _after(words: str, say: Say) -> Say:
    return lambda line: say(f"{words}, {line}")


def _stored(checkpoint: Checkpoint) -> str:
    if checkpoint.rounded:
        return "int4" if 4 in checkpoint.rounded.values() else "int8"
    return str(checkpoint.tensors["model.embed_tokens.weight"].dtype).removeprefix("torch.")


def _ours(checkpoint: Path, slots: int, context: int, count: int) -> list[str]:
    serve = [sys.executable, "-m", "modicum", "serve", str(checkpoint)]
    return [*serve, "--port", "0", "--slots", str(slots), "--context", str(context), "--max-queue", str(count)]


def _theirs(file: Path, slots: int, context: int, threads: int, load: Load) -> list[str]:
    numbers = (slots, context, threads, max(load.users or 0, slots) + 2)
    return [sys.executable, "-P", serving_llama.__file__, str(file), *map(str, numbers)]


def _row(system: str, mode: str, load: Load, rounds: Sequence[dict[str, Any]]) -> ServeRow:
    speeds = [one["tokens_per_s"] for one in rounds]
    faults: dict[str, int] = {}
    for one in rounds:
        for cause, count in one["faults"].items():
            faults[cause] = faults.get(cause, 0) + count
    given: dict[str, Any] = {
        "slots": load.slots(),
        "requests": sum(one["requests"] for one in rounds),
        "errors": sum(one["errors"] for one in rounds),
        "faults": faults,
        "low": min(speeds),
        "high": max(speeds),
    }
    rest = [field.name for field in fields(ServeRow)[3:] if field.name not in given]
    return ServeRow(system, mode, load.words(), **given, **{name: median(one[name] for one in rounds) for name in rest})


def _check(mix: Mix, checkpoint: Checkpoint) -> None:
    context = checkpoint.config.max_position_embeddings
    if max(mix.prompt) + max(mix.answer) > context:
        raise UserError(
            f"{checkpoint.path}: {max(mix.prompt)} tokens of prompt and {max(mix.answer)} of answer are more than its "
            f"context of {context}; ask for fewer"
        )
    if min(mix.prompt) < 1 or min(mix.answer) < 2:
        raise UserError("expected prompts of at least 1 token and answers of at least 2, between which there is a time")
    if not 0 <= mix.shared < min(mix.prompt):
        raise UserError(f"{mix.shared} tokens that all prompts share: expected fewer than the shortest has")
    if find_spec("aiohttp") is None:
        raise UserError("sending requests needs aiohttp: pip install 'modicum[bench]'")


def _check_requests(requests: int | None, loads: Sequence[Load]) -> None:
    """UserError where some users would have nothing to ask, so that a row would tell of fewer than it says."""
    most = max((load.users or 0 for load in loads), default=0)
    if requests is not None and requests < most:
        raise UserError(f"{requests} requests are fewer than {most} users; ask for a request a user at least")


def _words(lengths: Sequence[int]) -> str:
    return " or ".join(map(str, dict.fromkeys(lengths)))
