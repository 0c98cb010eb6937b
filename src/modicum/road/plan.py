"""What a run will cost here, before it starts: parameters, tokens, FLOPs, memory, disk and hours.

Sizes are arithmetic; speed and memory come from a few real updates on this machine. A run that cannot fit says so.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from modicum.model import ModelConfig, Parameters, parameters_by_part
from modicum.recipe import Recipe
from modicum.road.budget import Budget, changes_for, smaller_presets
from modicum.road.chips import Elsewhere, elsewhere
from modicum.road.disk import Disk, disk_of
from modicum.road.fits import device_memory, free_device_memory, least_memory, refuse_disk, refuse_memory
from modicum.road.machine import (
    busy_cores,
    bytes_below,
    describe_machine,
    free_disk,
    usable_cores,
)
from modicum.road.memory import Memory, expected_memory, rows_to_try, whole_in_update
from modicum.road.sizes import OPTIMAL_TOKENS_PER_PARAMETER
from modicum.road.start import check_ranks, check_start, model_config
from modicum.road.text import Text, text_of
from modicum.road.timing import StagePlan, stage_plans
from modicum.road.trial import Trial, try_updates
from modicum.road.words import three_figures
from modicum.road.works import TrainingWork, training_works
from modicum.store import UserError, memory_limit

_IDLE_LOAD = 0.75  # a core; above it a trial shares the machine with others


@dataclass(frozen=True)
class Plan:
    """Everything `modicum plan` says: bytes, seconds, tokens; None where it was not measured or is not known.

    tokens: that pretraining reads. flops: of all training. memory: of the stage that needs most, on one rank, and
    memory_limit: what there is of it on that stage's device. how: device, dtype and threads of the trial. notes: what
    the reader should know, a sentence each. changes: what would have to change to keep within the budget that was asked
    for; None where none was. elsewhere: on other chips, computed.
    """

    name: str
    machine: str
    model: dict[str, Any]
    parameters: Parameters
    text: Text
    tokens: int
    flops: float
    stages: tuple[StagePlan, ...]
    memory: Memory
    disk: Disk
    memory_limit: int
    free_disk: int
    how: str | None
    notes: tuple[str, ...]
    changes: tuple[str, ...] | None = None
    elsewhere: Elsewhere | None = None

    @property
    def tokens_per_parameter(self) -> float:
        return self.tokens / self.parameters.total

    @property
    def seconds(self) -> float | None:
        """Of the whole run; None when a stage's time is not known."""
        known = [stage.seconds for stage in self.stages if stage.seconds is not None]
        return sum(known) if len(known) == len(self.stages) else None

    def to_dict(self) -> dict[str, Any]:
        """Plain data. `seconds` and `peak_memory_bytes` are by stage and for the whole run, as the report sets them
        beside what was measured."""
        seconds = {stage.name: stage.seconds for stage in self.stages if stage.seconds is not None}
        memory = {stage.name: stage.peak_memory_bytes for stage in self.stages if stage.peak_memory_bytes is not None}
        if self.seconds is not None:
            seconds["whole run"] = self.seconds
        return {
            **asdict(self),
            "parameters": {**asdict(self.parameters), "total": self.parameters.total},
            "tokens_per_parameter": self.tokens_per_parameter,
            "optimal_tokens_per_parameter": OPTIMAL_TOKENS_PER_PARAMETER,
            "memory": {**asdict(self.memory), "total": self.memory.total},
            "disk": {**asdict(self.disk), "total": self.disk.total},
            "seconds": seconds,
            "peak_memory_bytes": {**memory, "whole run": self.memory.total},
        }


def plan(
    recipe: Recipe,
    *,
    measure: bool = True,
    ranks: int = 1,
    budget: Budget | None = None,
    chip: str | None = None,
    gpus: int = 1,
) -> Plan:
    """Plan the run of a recipe. measure: try a few updates here, which takes seconds, or a minute with compiling.

    ranks: processes that are to train together, each on a device like this one's, which share every batch evenly.
    budget: say what would have to change to keep within it. chip: also compute the time on `gpus` of that chip.

    Raises UserError when the run cannot fit into this machine's memory or disk, with what to change: a note where a
    chip is named, and then nothing is tried here. And for files that cannot be read, as the run would.
    """
    check_start(recipe)
    check_ranks(recipe, gpus if chip is not None else ranks)
    text = text_of(recipe)
    config = model_config(recipe, text.vocab_size)
    works = training_works(recipe, config, text, ranks=ranks)
    disk = disk_of(
        recipe,
        config,
        text_bytes=text.bytes or 0,
        tokens=text.tokens or 0,
        sft_steps=works[-1].steps if works[-1].stage == "sft" else 0,
    )
    refusals: list[str] = []

    def hold(refuse: Callable[..., None], *figures: Any) -> None:
        try:
            refuse(*figures)
        except UserError as error:
            if chip is None:
                raise
            refusals.append(f"not on this machine: {error}")

    # what the run has written already is part of what it needs
    hold(refuse_disk, disk, free_disk(recipe.run_folder) + bytes_below(recipe.run_folder))
    trained = [work for work in works if work.steps]
    for work in trained:
        hold(refuse_memory, least_memory(expected_memory(config, work, None)), work)
    load = busy_cores()
    trials: dict[str, Trial] = {}
    for work in works if measure and not refusals else ():
        rows = rows_to_try(config, work, free_device_memory(work))
        if rows:
            trials[work.stage] = _shared_trial(config, work, rows, works, trials)
    memories = [expected_memory(config, work, trials.get(work.stage)) for work in trained or works]
    for work, memory in zip(trained, memories, strict=False) if not refusals else ():
        hold(refuse_memory, memory, work)
    largest = max(memories, key=lambda memory: memory.total)
    fullest = next(work for work in works if work.stage == largest.stage)
    stages = stage_plans(recipe, config, text, works, trials)
    flops = sum(work.flops for work in works)
    return Plan(
        name=recipe.name,
        machine=describe_machine().line(),
        model={**_origin(recipe), **asdict(config)},
        parameters=parameters_by_part(config),
        text=text,
        tokens=works[0].tokens,
        flops=flops,
        stages=stages,
        memory=largest,
        disk=disk,
        memory_limit=device_memory(fullest) or memory_limit(),
        free_disk=free_disk(recipe.run_folder),
        how=_how(trials.get("pretrain")),
        notes=(
            *refusals,
            *_notes(text, works[0], config, fresh=recipe.model.checkpoint is None),
            *(_load_note(load) if trials else ()),
        ),
        changes=None
        if budget is None
        else changes_for(budget, config, works, trials, stages, smaller=_to_name(recipe, config)),
        elsewhere=None
        if chip is None
        else elsewhere(
            chip,
            gpus,
            flops=flops,
            memory=largest,
            whole=whole_in_update(config, replace(fullest, ranks=gpus)),
            rows=fullest.rows,
            batch_size=fullest.batch_size,
        ),
    )


def _to_name(recipe: Recipe, config: ModelConfig) -> dict[str, ModelConfig]:
    """The smaller models that this recipe could have: none where a checkpoint says what it is."""
    return {} if recipe.model.checkpoint is not None else smaller_presets(config)


def _shared_trial(
    config: ModelConfig, work: TrainingWork, rows: int, works: list[TrainingWork], done: dict[str, Trial]
) -> Trial:
    """A trial of this stage, or an earlier one's when that had the same shape and the trainer would choose the same."""
    for earlier in works:
        trial = done.get(earlier.stage)
        same = all(getattr(earlier, name) == getattr(work, name) for name in ("wishes", "optimizer", "compiles"))
        if trial is not None and same and (trial.rows, trial.length) == (rows, work.length):
            return trial
    return try_updates(
        config, rows=rows, length=work.length, wishes=work.wishes, optimizer=work.optimizer, flops=work.flops
    )


def _how(trial: Trial | None) -> str | None:
    if trial is None:
        return None
    choices = trial.choices
    compiled = ", compiled" if choices["compile"] else ""
    return f"{choices['device']}, {choices['dtype']}{compiled}, {choices['threads']} threads"


def _load_note(load: float) -> list[str]:
    cores = usable_cores()
    if load < _IDLE_LOAD * cores:
        return []
    other = f"other work was running while this was measured (load {load:.1f} on {cores} cores)"
    return [f"{other}, so alone the run takes less time"]


def _origin(recipe: Recipe) -> dict[str, str]:
    start = recipe.model.checkpoint
    return {"preset": recipe.model.preset} if start is None else {"checkpoint": str(start)}


def _notes(text: Text, pretrain: TrainingWork, config: ModelConfig, *, fresh: bool) -> list[str]:
    """Sentences about what is estimated, and about too little or too much text."""
    notes = []
    if text.tokens is None:
        notes.append("a Hub data set's size is not known here, so tokens, disk and the time to prepare leave it out")
    elif not text.exact:
        notes.append(
            f"tokens of the corpus are estimated from its size at {text.bytes_per_token:.2f} bytes a token; after "
            "`modicum prepare` they are exact"
        )
    for name, epochs in text.epochs.items():
        if epochs > text.max_epochs[name]:
            notes.append(
                f"source {name} would be read about {epochs:.1f} times, and its max_epochs is "
                f"{text.max_epochs[name]:g}: the run would refuse; fewer steps, more text, or a higher max_epochs"
            )
    ratio = pretrain.tokens / config.parameter_count()
    if fresh and ratio < OPTIMAL_TOKENS_PER_PARAMETER / 4:
        notes.append(
            f"{three_figures(ratio)} tokens a parameter are few beside the {OPTIMAL_TOKENS_PER_PARAMETER} of Hoffmann "
            "et al. 2022: a smaller model would learn more from the same compute"
        )
    return notes
