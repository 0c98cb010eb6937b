"""A checkpoint becomes one of rounded weights, when what it says stays within limits; figures stand side by side."""

import copy
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from modicum.checkpoint import Checkpoint, load_checkpoint
from modicum.checkpoint.save import WEIGHTS, mark_trained, write_model
from modicum.evaluate.beside import Cost, Judged, check_free
from modicum.evaluate.divergence import Limits
from modicum.evaluate.texts import Texts, judging_texts
from modicum.generate import Generator, SamplingParams
from modicum.model.native import kernel_fault
from modicum.model.packing import BLOCK, RoundedMatrix
from modicum.model.quantized import matrix_names
from modicum.quantize.judging import Judge, input_moments, moment_bytes, rounded, sensitivities
from modicum.quantize.mixing import Mix, mix
from modicum.quantize.rounding import round_matrix
from modicum.quantize.texts import equal_rows, fitting_texts, token_rows, without_judges
from modicum.quantize.tuning import ROWS, tune
from modicum.store import UserError, atomic_directory, refuse_taken, write_json, write_manifest
from modicum.tokenizer import Tokenizer

Target = Literal["int8", "int4"]
LIMITS: dict[Target, Limits] = {"int8": Limits(2e-3, 2e-2, 0.985), "int4": Limits(3e-2, 3e-1, 0.93)}
_TABLE = "model.embed_tokens"
_LENGTH, _FIT_TOKENS = 256, 8_192
_JUDGED, _JUDGED_TOKENS = 50, 128
_SENSITIVITY_ROWS = 10  # of those that choose: less time, and only an order is wanted
_WITHIN = 0.9  # of a budget: what is just met on the texts that choose is as soon missed on those that judge
_TUNING_LENGTH, _SPOKEN = 128, 64


@dataclass(frozen=True)
class QuantizeReport:
    """fitted_to: whose texts, in words. bits: of each rounded matrix. promoted: those with more than was asked for, the
    dearest first. costs: mean KL divergence (nats) of each matrix rounded alone, where it was measured. judged: what it
    says beside full precision, on texts that chose nothing; cost and full: what it and full precision cost on a CPU."""

    out: Path
    to: Target
    fitted_to: str
    bits: dict[str, int]
    promoted: tuple[str, ...]
    costs: dict[str, float]
    tuned_steps: int
    limits: Limits
    judged: Judged
    cost: Cost
    full: Cost
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
    min_agreement: float | None = None,
    text: Path | None = None,
    heldout: Path | None = None,
    tune_steps: int = 0,
    progress: Callable[[str], None] = lambda _: None,
) -> QuantizeReport:
    """Write `out`, a checkpoint with matrices of 8 bits, or of 4 (the embedding, and a head, of 8), and quantize.json.

    max_kl: a budget of mean KL divergence (nats; ten times it at the 99th percentile) that is met by giving the
    matrices that cost most more bits: 8 for 4, full precision for 8. Without it all are rounded alike, and LIMITS[to]
    decide. min_agreement: a share of equal first choices, in the place of LIMITS'. text: what is fitted to; without it,
    texts that the model writes itself. heldout: what is judged by; without it, the held-out text of the checkpoint's
    run, or other texts that it writes. tune_steps: updates that tune the weights to their rounding, on `text`. Raises
    UserError, and writes nothing, when the limits do not hold, when `out` is there already, and when the checkpoint is
    rounded already.
    """
    refuse_taken(out)
    limits = LIMITS[to].with_bounds(max_kl=max_kl, min_agreement=min_agreement)
    if tune_steps and text is None:
        raise UserError("--tune: needs --text, for a model tuned on its own texts learns nothing of others")
    if text is not None and heldout is not None and text.resolve() == heldout.resolve():
        raise UserError(f"--heldout {heldout}: is what --text fits to; what is fitted to must not judge, name another")
    loaded = load_checkpoint(checkpoint)
    loaded.weights  # noqa: B018 (refuses those that are rounded already)
    _check_memory(loaded, tune_steps)
    progress("reading the texts")
    judging = judging_texts(loaded, heldout, texts=_JUDGED, tokens=_JUDGED_TOKENS)
    given = fitting_texts(text, loaded)
    texts = without_judges(given, judging)
    if not texts and given:
        raise UserError(f"--text {text}: all of it is among what judges; name other text to fit to, or to judge by")
    context = loaded.config.max_position_embeddings
    fit = token_rows(texts, length=min(_LENGTH, context), tokens=_FIT_TOKENS)
    full = loaded.model().requires_grad_(False)
    chooser, judge = _judges(full, judging, tune_steps, max_kl, _nearest_folder(out))
    progress(f"judging by {judge.texts.source}")
    progress("rounding")
    student = full  # it has rounded matrices only for as long as it is asked with them
    matrices = _rounded(student, to, input_moments(full, fit))
    notes: tuple[str, ...] = () if (fault := kernel_fault()) is None else (f"slower than it could be here: {fault}",)
    if common := len(given) - len(texts):
        notes += (f"{common} of the texts to fit to are among those that judge, and were not fitted to",)
    if tune_steps:
        tokens = tune_steps * ROWS * _TUNING_LENGTH
        rows = equal_rows(texts, length=min(_TUNING_LENGTH, context), tokens=tokens, fewest=ROWS)
        tuned = copy.deepcopy(full)
        learned = tune(full, tuned, matrices, rows, steps=tune_steps, say=progress)
        if chooser.mean_kl(tuned, learned) < chooser.mean_kl(student, matrices):
            student, matrices = tuned, learned
        else:
            notes += (f"{tune_steps} updates of tuning brought it no nearer, and are not in it",)
            tune_steps = 0
    better: dict[str, RoundedMatrix | None] = {}
    costs: dict[str, float] = {}
    if max_kl is not None:
        progress("measuring what each matrix costs")
        costs = sensitivities(chooser, student, matrices, rows=_SENSITIVITY_ROWS)
        better = {name: _with_more(student, name, matrix) for name, matrix in matrices.items() if _can_gain(to, matrix)}
    within = limits if max_kl is None else replace(limits, mean_kl=_WITHIN * max_kl)
    chosen = mix(chooser, student, matrices, better, costs, within, say=progress)
    with rounded(student, chosen.matrices):
        faults = judge(student).faults(limits)
    if faults:
        ways = "--max-kl gives some matrices more bits, " if max_kl is None else ""
        raise UserError("\n".join([f"{checkpoint}: {to} is refused, nothing was written:", *faults, _hint(ways)]))
    progress(f"writing {out}")
    with atomic_directory(out) as folder:
        _write(folder, loaded, student, chosen)
        write_manifest(folder)
        found = judge.beside(load_checkpoint(folder).model(), loaded.tokenizer)  # what is kept is the file
        faults = found.quality.faults(limits)
        if faults:
            raise UserError("\n".join([f"{out}: not what was measured before it was written; left out:", *faults]))
        progress("measuring what both cost")
        report = QuantizeReport(
            out=out,
            to=to,
            fitted_to="the model's own texts" if text is None else str(text),
            bits={name: matrix.bits for name, matrix in chosen.matrices.items()},
            promoted=chosen.promoted,
            costs=costs,
            tuned_steps=tune_steps,
            limits=limits,
            judged=found,
            cost=_cost(folder),
            full=_cost(checkpoint),
            notes=notes,
        )
        write_json(folder / "quantize.json", {key: value for key, value in report.to_dict().items() if key != "out"})
        write_manifest(folder)
    return report


def _judges(full: Any, texts: Texts, tune_steps: int, max_kl: float | None, folder: Path) -> tuple[Judge, Judge]:
    """By whose texts anything is chosen, and by whose the result is judged: halves, for what was chosen by a text looks
    better on it; all texts where nothing is to choose. Raises UserError for a single one."""
    if not tune_steps and max_kl is None:
        judge = Judge(full, texts, folder)
        return judge, judge
    if len(texts.rows) < 2:
        raise UserError(f"--heldout: a single text ({texts.source}) cannot both choose and judge; give two or more")
    half = len(texts.rows) // 2
    halves = (replace(texts, rows=texts.rows[:half]), replace(texts, rows=texts.rows[half:]))
    return Judge(full, halves[0], folder), Judge(full, halves[1], folder)


def _nearest_folder(out: Path) -> Path:
    """Of those that `out` will lie in, the nearest that is there."""
    return next(folder for folder in out.absolute().parents if folder.is_dir())


def _hint(ways: str) -> str:
    return (
        f"{ways}--tune STEPS --text FILE tunes the weights to their rounding, int8 loses less than int4, "
        "--min-agreement allows more"
    )


def _rounded(model: Any, to: Target, moments: dict[str, Any]) -> dict[str, RoundedMatrix]:
    """Every matrix, plainly. What is looked up, and what does not divide into groups, has 8 bits in any case."""
    found = {}
    for name in matrix_names(model):
        weight = model.get_submodule(name).weight.data
        small = to == "int4" and name not in (_TABLE, "lm_head") and weight.shape[1] % BLOCK == 0
        found[name] = round_matrix(weight, 4 if small else 8, moments.get(name))
    return found


def _check_memory(checkpoint: Checkpoint, tune_steps: int) -> None:
    """UserError where memory is too short: float32 weights and input moments; the tuned copy, its gradients and AdamW's
    two moments."""
    copies = 5 if tune_steps else 1
    try:
        check_free(copies * 4 * checkpoint.config.parameter_count() + moment_bytes(checkpoint.config))
    except UserError as error:
        mend = "leave out --tune, or take" if tune_steps else "take"
        raise UserError(f"{checkpoint.path}: to round it, {error}; {mend} a machine with more") from None


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
        chat=source.talks,
        stop_ids=source.stop_ids,
        rounded=chosen.matrices,
    )
    if source.was_trained:
        mark_trained(folder)


def _cost(path: Path) -> Cost:
    start = time.perf_counter()
    loaded = load_checkpoint(path, verify=False)
    model = loaded.model()
    seconds = time.perf_counter() - start
    speed = _speed(Generator(model, loaded.tokenizer, stop_ids=[]), loaded.tokenizer)
    memory = sum(part.nbytes for part in (*model.parameters(), *model.buffers()))
    return Cost((path / WEIGHTS).stat().st_size, seconds, speed, memory)


def _speed(generator: Generator, tokenizer: Tokenizer) -> float:
    """Tokens a second of one greedy answer, the second of two."""
    tokens = min(_SPOKEN, generator.context - 1)
    params = SamplingParams(temperature=0, max_new_tokens=tokens)
    generator.generate([[tokenizer.bos_id]], params)
    start = time.perf_counter()
    generator.generate([[tokenizer.bos_id]], params)
    return tokens / (time.perf_counter() - start)
