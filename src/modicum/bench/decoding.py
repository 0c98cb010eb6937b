"""How fast one answer comes, and how fast a prompt is read: modicum beside transformers and llama.cpp, same weights."""

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch

from modicum.bench.turns import Say, take_turns
from modicum.checkpoint import Checkpoint, load_checkpoint
from modicum.checkpoint.save import write_model
from modicum.exchange.gguf_runtime import library
from modicum.exchange.gguf_weights import Quant, file_tensors, gguf_library
from modicum.exchange.gguf_writing import file_metadata, write_gguf
from modicum.model.quantized import matrix_names
from modicum.quantize.rounding import round_matrix
from modicum.road.machine import describe_machine, usable_cores
from modicum.store import UserError
from modicum.train.plan import silent

_WORKER = "modicum.bench.decoding_worker"

Weights = Literal["as-stored", "int8", "int4"]


@dataclass(frozen=True)
class DecodeRow:
    """Medians over all rounds: tokens a second of one answer (low and high: the slowest and fastest round's), of a
    prompt that is read, and the largest resident set, 10^6 bytes."""

    system: str
    mode: str
    tokens_per_s: float
    low: float
    high: float
    prefill_tokens_per_s: float
    peak_rss_mb: float


@dataclass(frozen=True)
class DecodeBench:
    """rows: ours first. what: what was measured, in words. machine: its line and threads."""

    what: str
    rows: tuple[DecodeRow, ...]
    machine: dict[str, Any]

    @property
    def ratios(self) -> dict[str, dict[str, float]]:
        """The first row's divided by each other's: above 1 is faster, but smaller is less memory."""
        first, *others = self.rows
        return {
            figure: {f"{row.system} {row.mode}": getattr(first, figure) / getattr(row, figure) for row in others}
            for figure in ("tokens_per_s", "prefill_tokens_per_s", "peak_rss_mb")
        }

    def to_dict(self) -> dict[str, Any]:
        """The shape that every `modicum bench` verb prints with --json."""
        rows = [asdict(row) for row in self.rows]
        return {"what": self.what, "rows": rows, "ratios": self.ratios, "machine": self.machine}


def bench_decoding(
    checkpoint: Path,
    *,
    ours: Sequence[Weights] = ("as-stored",),
    transformers: bool = False,
    llama: Sequence[Quant] = (),
    prompt: int = 512,
    tokens: int = 128,
    repeats: int = 3,
    rounds: int = 3,
    say: Say = silent,
) -> DecodeBench:
    """One greedy answer of `tokens` tokens to a prompt of 16, and a prompt of `prompt` tokens, both of random ids.

    ours: the checkpoint as it is, or plainly rounded, for its speed alone. llama: number types of GGUF files made of
    it. Each system has a process of its own, in turn, and all the same threads. Raises UserError when the prompts do
    not fit the context, when a peer is missing, and for rounded weights where full ones are needed.
    """
    loaded = load_checkpoint(checkpoint)
    config, threads = loaded.config, usable_cores()
    if max(prompt + 1, 16 + tokens + 1) > config.max_position_embeddings:
        raise UserError(
            f"{checkpoint}: {prompt} tokens of prompt, or 16 and {tokens} of answer, are more than its context of "
            f"{config.max_position_embeddings}; ask for fewer"
        )
    ids = torch.randint(loaded.tokenizer.vocab_size, (prompt,), generator=torch.Generator().manual_seed(0)).tolist()
    short = (ids * 16)[:16]
    shape = {"prompt": ids, "short": short, "tokens": tokens, "repeats": repeats, "threads": threads}
    with tempfile.TemporaryDirectory(prefix="modicum-") as place:
        paths: dict[tuple[str, str], Path] = {}
        for kind in ours:
            paths["modicum", kind] = checkpoint if kind == "as-stored" else _rounded(loaded, kind, Path(place))
        if transformers:
            loaded.weights  # noqa: B018 (refuses rounded ones, which it would widen)
            paths["transformers", "generate fp32"] = checkpoint
        for quant in llama:
            paths["llama.cpp", quant] = gguf_of(loaded, quant, Path(place))
        orders = {
            f"{system} {mode}": {**shape, "system": system, "path": str(path)} for (system, mode), path in paths.items()
        }
        answers = take_turns(_WORKER, orders, rounds=rounds, say=say)
    return DecodeBench(
        f"one answer of {tokens} tokens and a prompt of {prompt}, {config.parameter_count():,} parameters, vocabulary "
        f"{config.vocab_size:,}; medians of {rounds} rounds",
        tuple(_row(*name, given) for name, given in zip(paths, answers.values(), strict=True)),
        {"line": describe_machine().line(), "threads": threads},
    )


def _row(system: str, mode: str, answers: Sequence[dict[str, Any]]) -> DecodeRow:
    speeds = [answer["tokens_per_s"] for answer in answers]
    middle = {name: median(answer[name] for answer in answers) for name in ("prefill_tokens_per_s", "peak_rss_mb")}
    return DecodeRow(system, mode, median(speeds), min(speeds), max(speeds), **middle)


def _rounded(source: Checkpoint, kind: Weights, place: Path) -> Path:
    """A checkpoint with all matrices rounded, unmeasured: the speed does not ask what it says."""
    model = source.model()
    matrices = {}
    for name in matrix_names(model):
        weight = source.weights[f"{name}.weight"]
        small = kind == "int4" and name not in ("model.embed_tokens", "lm_head") and weight.shape[1] % 32 == 0
        matrices[name] = round_matrix(weight, 4 if small else 8)
    kept = {name: w for name, w in source.weights.items() if name.removesuffix(".weight") not in matrices}
    folder = place / kind
    folder.mkdir()
    write_model(folder, config=source.config, weights=kept, tokenizer=source.tokenizer, chat=False, rounded=matrices)
    return folder


def gguf_of(source: Checkpoint, quant: Quant, place: Path) -> Path:
    """A GGUF file of a checkpoint in the folder `place`, unproven. Rounded weights are widened, and rounded again."""
    gguf_library(), library()
    file = place / f"{quant}.gguf"
    metadata = file_metadata(source.config, source.tokenizer, quant)
    weights = source.model(widened=True).state_dict() if source.rounded else source.weights
    write_gguf(file, source.config, metadata, file_tensors(weights, source.config, quant))
    return file
