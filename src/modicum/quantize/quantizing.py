"""A checkpoint becomes one of rounded weights, when what it says stays within limits; figures stand side by side."""

import copy
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from modicum.checkpoint import Checkpoint, load_checkpoint
from modicum.checkpoint.save import WEIGHTS, write_model
from modicum.corpus import Document
from modicum.evaluate import bits_per_byte
from modicum.evaluate.divergence import Limits, Quality
from modicum.generate import Generator, SamplingParams
from modicum.model.native import kernel_fault
from modicum.model.packing import BLOCK, RoundedMatrix
from modicum.model.quantized import matrix_names
from modicum.quantize.judging import Judge, input_moments, sensitivities
from modicum.quantize.mixing import Mix, mix
from modicum.quantize.rounding import round_matrix
from modicum.quantize.texts import Texts, read_texts, token_rows
from modicum.quantize.tuning import ROWS, tune
from modicum.store import UserError, atomic_directory, refuse_taken, write_json, write_manifest
from modicum.tokenizer import Tokenizer

Target = Literal["int8", "int4"]
LIMITS: dict[Target, Limits] = {"int8": Limits(2e-3, 2e-2, 0.985), "int4": Limits(3e-2, 3e-1, 0.93)}
_TABLE = "model.embed_tokens"
_LENGTH, _FIT_TOKENS, _JUDGE_TOKENS = 256, 8_192, 4_096
_SENSITIVITY_ROWS = 4  # of those that judge: a quarter of the time, and only an order is wanted
_TUNING_LENGTH, _SPOKEN = 128, 64


@dataclass(frozen=True)
class Side:
    """One of the two: bytes of its weights on disk and in memory, seconds to load, tokens a second of one answer on a
    CPU, and bits per byte of the texts that judge."""

    disk_bytes: int
    memory_bytes: int
    load_seconds: float
    tokens_per_s: float
    bits_per_byte: float


@dataclass(frozen=True)
class QuantizeReport:
    """bits: of each rounded matrix. promoted: those with more than was asked for, the dearest first. costs: mean KL
    divergence (nats) of each matrix rounded alone, where it was measured. own_texts: judged by the model's own."""

    out: Path
    to: Target
    bits: dict[str, int]
    promoted: tuple[str, ...]
    costs: dict[str, float]
    tuned_steps: int
    own_texts: bool
    limits: Limits
    quality: Quality
    full: Side
    rounded: Side
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON data."""
        return {**asdict(self), "out": str(self.out)}


def quantize_checkpoint(
    checkpoint: Path,
    *,
    to: Target,
    out: Path,
    max_kl: float | None = None,
    text: Path | None = None,
    tune_steps: int = 0,
    progress: Callable[[str], None] = lambda _: None,
) -> QuantizeReport:
    """Write `out`, a checkpoint with matrices of 8 bits, or of 4 (the embedding, and a head, of 8), and quantize.json.

    max_kl: a budget of mean KL divergence (nats; ten times it at the 99th percentile) that is met by giving the
    matrices that cost most more bits: 8 for 4, full precision for 8. Without it all are rounded alike, and LIMITS[to]
    decide. text: what is fitted to and, other parts of it, judged by; without it, texts that the model writes itself.
    tune_steps: updates that tune the weights to their rounding, on that text. Raises UserError, and writes nothing,
    when the limits do not hold, when `out` is there already, and when the checkpoint is rounded already.
    """
    refuse_taken(out)
    if tune_steps and text is None:
        raise UserError("--tune: needs --text, for a model tuned on its own texts learns nothing of others")
    loaded = load_checkpoint(checkpoint)
    loaded.weights  # noqa: B018 (refuses those that are rounded already)
    progress("reading the texts")
    texts = read_texts(text, loaded)
    fit = token_rows(loaded, texts.fit, length=_LENGTH, tokens=_FIT_TOKENS)
    full = loaded.model().requires_grad_(False)
    judge = Judge(full, token_rows(loaded, texts.judge, length=_LENGTH, tokens=_JUDGE_TOKENS))
    progress("rounding")
    moments = input_moments(full, fit)
    student = copy.deepcopy(full)
    matrices = _rounded(student, to, moments)
    notes: tuple[str, ...] = () if (fault := kernel_fault()) is None else (f"slower than it could be here: {fault}",)
    if tune_steps:
        rows = token_rows(loaded, texts.fit, length=_TUNING_LENGTH, tokens=tune_steps * ROWS * _TUNING_LENGTH)
        tuned = copy.deepcopy(full)
        learned = tune(full, tuned, matrices, rows, steps=tune_steps, say=progress)
        if judge.mean_kl(tuned, learned) < judge.mean_kl(student, matrices):
            student, matrices = tuned, learned
        else:
            notes += (f"{tune_steps} updates of tuning brought it no nearer, and are not in it",)
            tune_steps = 0
    limits = LIMITS[to] if max_kl is None else replace(LIMITS[to], mean_kl=max_kl, tail_kl=10 * max_kl)
    better: dict[str, RoundedMatrix | None] = {}
    costs: dict[str, float] = {}
    if max_kl is not None:
        progress("measuring what each matrix costs")
        costs = sensitivities(judge, student, matrices, rows=_SENSITIVITY_ROWS)
        better = {name: _with_more(student, name, matrix) for name, matrix in matrices.items() if _can_gain(to, matrix)}
    chosen = mix(judge, student, matrices, better, costs, limits, say=progress)
    faults = chosen.quality.faults(limits)
    if faults:
        ways = "--max-kl gives some matrices more bits, " if max_kl is None else ""
        raise UserError("\n".join([f"{checkpoint}: {to} is refused, nothing was written:", *faults, _hint(ways)]))
    progress(f"writing {out}")
    with atomic_directory(out) as folder:
        _write(folder, loaded, student, chosen)
        write_manifest(folder)
        chosen = replace(chosen, quality=judge(load_checkpoint(folder).model()))  # what is kept is the file
        faults = chosen.quality.faults(limits)
        if faults:
            raise UserError("\n".join([f"{out}: not what was measured before it was written; left out:", *faults]))
        report = _report(folder, loaded, texts, chosen, limits, progress)
        report = replace(report, out=out, to=to, costs=costs, tuned_steps=tune_steps, notes=notes)
        write_json(folder / "quantize.json", {key: value for key, value in report.to_dict().items() if key != "out"})
        write_manifest(folder)
    return report


def _hint(ways: str) -> str:
    return f"{ways}--tune STEPS --text FILE tunes the weights to their rounding, int8 loses less than int4"


def _rounded(model: Any, to: Target, moments: dict[str, Any]) -> dict[str, RoundedMatrix]:
    """Every matrix, plainly. What is looked up, and what does not divide into groups, has 8 bits in any case."""
    found = {}
    for name in matrix_names(model):
        weight = model.get_submodule(name).weight.data
        small = to == "int4" and name not in (_TABLE, "lm_head") and weight.shape[1] % BLOCK == 0
        found[name] = round_matrix(weight, 4 if small else 8, moments.get(name))
    return found


def _can_gain(to: Target, matrix: RoundedMatrix) -> bool:
    return to == "int8" or matrix.bits == 4


def _with_more(model: Any, name: str, matrix: RoundedMatrix) -> RoundedMatrix | None:
    return round_matrix(model.get_submodule(name).weight.data, 8) if matrix.bits == 4 else None


def _write(folder: Path, source: Checkpoint, model: Any, chosen: Mix) -> None:
    kept = {
        name: weight
        for name, weight in model.state_dict().items()
        if name.removesuffix(".weight") not in chosen.matrices
    }
    write_model(
        folder,
        config=source.config,
        weights=kept,
        tokenizer=source.tokenizer,
        chat=source.tokenizer.end_of_turn_id in source.stop_ids,
        stop_ids=source.stop_ids,
        rounded=chosen.matrices,
    )


def _report(
    folder: Path, source: Checkpoint, texts: Texts, chosen: Mix, limits: Limits, progress: Callable[[str], None]
) -> QuantizeReport:
    progress("measuring both")
    return QuantizeReport(
        out=folder,
        to="int8",
        bits={name: matrix.bits for name, matrix in chosen.matrices.items()},
        promoted=chosen.promoted,
        costs={},
        tuned_steps=0,
        own_texts=texts.own,
        limits=limits,
        quality=chosen.quality,
        full=_side(source.path, texts.judge),
        rounded=_side(folder, texts.judge),
        notes=(),
    )


def _side(path: Path, judge: list[Document]) -> Side:
    start = time.perf_counter()
    loaded = load_checkpoint(path, verify=False)
    model = loaded.model()
    seconds = time.perf_counter() - start
    score = bits_per_byte(model, loaded.tokenizer, judge, max_tokens=_JUDGE_TOKENS, bootstrap_samples=20)
    speed = _speed(Generator(model, loaded.tokenizer, stop_ids=[]), loaded.tokenizer)
    memory = sum(part.nbytes for part in (*model.parameters(), *model.buffers()))
    return Side((path / WEIGHTS).stat().st_size, memory, seconds, speed, score.total.value)


def _speed(generator: Generator, tokenizer: Tokenizer) -> float:
    """Tokens a second of one greedy answer, the faster of two."""
    tokens = min(_SPOKEN, generator.context - 1)
    params = SamplingParams(temperature=0, max_new_tokens=tokens)
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        generator.generate([[tokenizer.bos_id]], params)
        seconds.append(time.perf_counter() - start)
    return tokens / min(seconds)
