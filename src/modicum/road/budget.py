"""What would have to change for a run to keep within a budget of memory or time."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import floor
from typing import get_args

from modicum.model import ActivationCheckpointing, ModelConfig, training_flops_per_token
from modicum.recipe import ModelSettings
from modicum.recipe.presets import PRESETS
from modicum.road.memory import Memory, activation_bytes, expected_memory
from modicum.road.timing import StagePlan
from modicum.road.trial import Trial
from modicum.road.words import duration, size
from modicum.road.works import TrainingWork
from modicum.store import UserError

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30}

# How much longer an update takes with each kind of activation checkpointing (docs/training-notes.md).
_LONGER = {"selective": "tenth", "full": "third"}


@dataclass(frozen=True)
class Budget:
    """Bytes that a stage may take, seconds that the whole run may; None: no bound."""

    memory_bytes: int | None = None
    seconds: float | None = None


def budget_of(memory: str | None, hours: float | None) -> Budget | None:
    """The budget as a user writes it; None where neither is given. Raises UserError for what is no amount."""
    if memory is None and hours is None:
        return None
    return Budget(None if memory is None else read_bytes(memory), None if hours is None else hours * 3600)


def read_bytes(text: str) -> int:
    """Bytes of "4GB", "512 MiB" or "4e9". Raises UserError for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\d{1,2})?)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in _UNITS:
        raise UserError(f"--memory {text}: expected a size such as 4GB or 512MiB")
    return round(float(match[1]) * _UNITS[match[2]])


def changes_for(
    budget: Budget,
    config: ModelConfig,
    works: list[TrainingWork],
    trials: Mapping[str, Trial],
    stages: Sequence[StagePlan],
    *,
    smaller: Mapping[str, ModelConfig],
) -> tuple[str, ...]:
    """What would have to change, a sentence each; nothing where the run keeps within its budget as it is.

    smaller: the models that may be named instead, largest first (`smaller_presets`; none where a checkpoint fixes it).
    """
    changes = []
    if budget.memory_bytes is not None:
        changes += memory_changes(budget.memory_bytes, config, works, trials, smaller)
    if budget.seconds is not None:
        seconds = {stage.name: stage.seconds for stage in stages}
        changes += time_changes(budget.seconds, config, works, seconds, smaller)
    return tuple(changes)


def smaller_presets(config: ModelConfig) -> dict[str, ModelConfig]:
    """The presets that are smaller than this model, at its vocabulary, largest first."""
    shapes = {
        name: ModelConfig.from_settings(ModelSettings.model_validate({"preset": name}), config.vocab_size)
        for name in PRESETS
    }
    sizes = {name: shape.parameter_count() for name, shape in shapes.items()}
    below = [name for name in sizes if sizes[name] < config.parameter_count()]
    return {name: shapes[name] for name in sorted(below, key=lambda name: -sizes[name])}


def memory_changes(
    budget: int,
    config: ModelConfig,
    works: list[TrainingWork],
    trials: Mapping[str, Trial],
    smaller: Mapping[str, ModelConfig],
) -> list[str]:
    """For each stage that takes more than `budget` bytes, the smallest change that is expected to do; nothing where all
    keep within it."""
    changes = []
    for work in [work for work in works if work.steps] or works:
        memory = expected_memory(config, work, trials.get(work.stage))
        if memory.total > budget:
            needs = f"{work.stage} needs {size(memory.total)}, more than {size(budget)}"
            changes.append(f"{needs}: {_memory_mend(budget, config, work, memory, smaller)}")
    return changes


def _memory_mend(
    budget: int, config: ModelConfig, work: TrainingWork, memory: Memory, smaller: Mapping[str, ModelConfig]
) -> str:
    rows = _fitting_rows(budget, memory, work)
    if rows:
        return f"{work.stage}.micro_batch_size: {rows} would take {size(_with_rows(memory, work, rows).total)}"
    kinds = get_args(ActivationCheckpointing)
    for kind in kinds[kinds.index(work.wishes.activation_checkpointing) + 1 :]:
        saving = replace(work, wishes=replace(work.wishes, activation_checkpointing=kind))
        share = activation_bytes(config, saving) / activation_bytes(config, work)
        lean = replace(memory, activations=round(memory.activations * share))
        rows = work.rows if lean.total <= budget else _fitting_rows(budget, lean, work)
        if rows:
            return (
                f"{work.stage}.activation_checkpointing: {kind} with micro_batch_size: {rows} would take about "
                f"{size(_with_rows(lean, work, rows).total)}, and each update about a {_LONGER[kind]} longer than with "
                "none"
            )
    least = _least(config, work)
    fits = next((name for name, shape in smaller.items() if _least(shape, work).total <= budget), None)
    if fits is not None:
        return f"this model takes at least {size(least.total)}; model.preset: {fits} fits with micro_batch_size: 1"
    if least.program >= budget:
        return f"Python and PyTorch alone take {size(least.program)}, so no model fits"
    return (
        f"it takes {size(least.total)} with micro_batch_size: 1; only a smaller model than any to name here would fit"
    )


def _with_rows(memory: Memory, work: TrainingWork, rows: int) -> Memory:
    return replace(memory, activations=memory.activations * rows // work.rows)


def _fitting_rows(budget: int, memory: Memory, work: TrainingWork) -> int | None:
    """The largest smaller micro-batch that divides the batch and fits."""
    smaller = [rows for rows in range(work.rows - 1, 0, -1) if work.batch_size % rows == 0]
    return next((rows for rows in smaller if _with_rows(memory, work, rows).total <= budget), None)


def _least(config: ModelConfig, work: TrainingWork) -> Memory:
    """With a micro-batch of one row."""
    return expected_memory(config, replace(work, rows=1), None)


def time_changes(
    budget: float,
    config: ModelConfig,
    works: list[TrainingWork],
    stage_seconds: Mapping[str, float | None],
    smaller: Mapping[str, ModelConfig],
) -> list[str]:
    """What shortens a run to `budget` seconds: fewer updates of pretraining, or a smaller model; nothing where it keeps
    within. Stages whose time is not known count as nothing, and are named."""
    known = {stage: seconds for stage, seconds in stage_seconds.items() if seconds is not None}
    total, pretrain = sum(known.values()), known.get("pretrain")
    if pretrain is None:
        return ["the time of this run is not known here, so nothing can be said of the hours"]
    unknown = [stage for stage in stage_seconds if stage not in known]
    if total <= budget:
        beside = f"the rest takes about {duration(total)}, within {duration(budget)}"
        return [f"nothing is known here of the time of {', '.join(unknown)}; {beside}"] if unknown else []
    uncounted = f", without {', '.join(unknown)}, whose time is not known here" if unknown else ""
    needs = f"the run takes about {duration(total)}{uncounted}, more than {duration(budget)}"
    work = works[0]
    left = budget - (total - pretrain)
    steps = floor(work.steps * left / pretrain) if pretrain else 0
    changes = []
    if steps >= 1:
        tokens = steps * work.batch_size * work.length
        changes.append(f"{needs}: pretrain.steps: {steps:,} of {work.steps:,} would fit, {tokens:,} tokens")
    for name, shape in smaller.items():
        share = training_flops_per_token(shape, work.length) / training_flops_per_token(config, work.length)
        if total * share <= budget:
            changes.append(f"{needs}: model.preset: {name} with the same text would fit, by its arithmetic")
            break
    return changes or [f"{needs}, and the stages beside pretraining alone take {duration(total - pretrain)}"]
