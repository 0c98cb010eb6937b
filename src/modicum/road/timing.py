"""How long each stage will take: training from a trial's updates, the others from rates and the trial's passes."""

from dataclasses import dataclass

from modicum.corpus import read_choices
from modicum.model import ModelConfig
from modicum.recipe import Recipe
from modicum.road.memory import expected_memory
from modicum.road.sizes import checkpoint_bytes
from modicum.road.text import Text
from modicum.road.trial import Trial
from modicum.road.works import TrainingWork

# Seconds a megabyte of text on two cores of a 2024 server: filters and deduplication, BPE training, encoding.
_CORPUS, _TOKENIZER, _SHARDS = 0.45, 0.18, 0.18
_SAVE_BYTES_A_SECOND = 150e6  # written, hashed and flushed
_STARTING = 5.0  # loading what a stage needs; plots of the report
_EVALUATE_BATCH = 16  # prompts answered together
_ITEM_TOKENS = 60  # a question with one of its four choices


@dataclass(frozen=True)
class StagePlan:
    """One stage. steps, tokens and flops of training stages; seconds and peak memory where they are known."""

    name: str
    seconds: float | None
    steps: int | None = None
    tokens: int | None = None
    flops: float | None = None
    tokens_per_second: float | None = None
    peak_memory_bytes: int | None = None


def stage_plans(
    recipe: Recipe, config: ModelConfig, text: Text, works: list[TrainingWork], trials: dict[str, Trial]
) -> tuple[StagePlan, ...]:
    """Every stage of the recipe's road in its order."""
    megabytes = None if text.bytes is None else text.bytes / 1e6
    sample = None if megabytes is None else min(megabytes, recipe.tokenizer.sample_mb)
    loaded = recipe.tokenizer.path is not None or recipe.model.checkpoint is not None
    plans = [
        StagePlan("corpus", _scaled(megabytes, _CORPUS / recipe.corpus.workers)),
        StagePlan("tokenizer", _STARTING if loaded else _scaled(sample, _TOKENIZER)),
        StagePlan("shards", _scaled(megabytes, _SHARDS)),
    ]
    plans += [training_plan(config, work, trials.get(work.stage)) for work in works]
    trial = trials.get(works[0].stage)
    plans.append(StagePlan("evaluate", None if trial is None else evaluate_seconds(recipe, text, trial)))
    return (*plans, StagePlan("report", _STARTING))


def training_plan(config: ModelConfig, work: TrainingWork, trial: Trial | None) -> StagePlan:
    """Updates, looks at held-out text, saves, and once what the first update takes longer than the others."""
    seconds = speed = None
    if trial is not None:
        # gradients grow with the rows; the optimizer's step is made once, whatever the micro-batches
        gradients = max(0.0, trial.update_seconds - trial.step_seconds)
        update = gradients * work.share / trial.rows + trial.step_seconds / (work.ranks if work.sharded else 1)
        heldout = work.heldout_tokens / work.ranks / (trial.rows * trial.length) * trial.forward_seconds
        saves = work.saves * checkpoint_bytes(config, work.optimizer) / _SAVE_BYTES_A_SECOND
        compiling = max(0.0, trial.first_seconds - trial.update_seconds)
        seconds = work.steps * update + heldout + saves + compiling
        speed = work.batch_size * work.length / update
    return StagePlan(
        work.stage,
        seconds,
        steps=work.steps,
        tokens=work.tokens,
        flops=work.flops,
        tokens_per_second=speed,
        peak_memory_bytes=expected_memory(config, work, trial).total,
    )


def evaluate_seconds(recipe: Recipe, text: Text, trial: Trial) -> float:
    """Held-out text by three models, or two without fine-tuning; questions; answers as long as they may be at most."""
    settings = recipe.evaluate
    tuned = text.talk is not None
    held = settings.heldout_tokens
    held = held if text.heldout_tokens is None else min(held, text.heldout_tokens)
    scored = held * (3 if tuned else 2)
    scored += sum(len(read_choices(path)) for path in settings.items) * 4 * _ITEM_TOKENS * (2 if tuned else 1)
    decoded = 0
    if tuned and text.talk is not None and recipe.sft is not None:
        share = recipe.sft.heldout_fraction
        scored += 3 * min(settings.heldout_tokens, round(text.talk.tokens * share / (1 - share)))
        conversations = round(text.talk.conversations * share / (1 - share))
        batches = -(-min(settings.prompts, conversations) // _EVALUATE_BATCH)
        decoded = batches * settings.max_new_tokens
    return _STARTING + scored * trial.score_seconds + decoded * trial.decode_seconds


def _scaled(amount: float | None, rate: float) -> float | None:
    return None if amount is None else amount * rate
