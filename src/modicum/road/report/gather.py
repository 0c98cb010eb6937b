"""Every figure of a run, read from what its stages left behind: the content of report.json, and of the page."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from modicum.model import ModelConfig, parameters_by_part
from modicum.recipe import Recipe
from modicum.road.machine import describe_machine
from modicum.store import RunDirectory
from modicum.train import read_metrics

STAGES = ("corpus", "tokenizer", "shards", "pretrain", "sft", "evaluate")
TRAINING = ("pretrain", "sft")
_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "max_position_embeddings",
)


def gather(run: RunDirectory, recipe: Recipe, *, code_version: str) -> dict[str, Any]:
    """The figures as plain data. What a run has not (no sft, questions, plan) is None or left out, never invented."""
    results = _json(run.path / "evaluate" / "results.json") or {}
    heldout, choices = results.get("heldout") or None, results.get("choices") or None
    # a run may hold an sft that its recipe has no more
    stages = [stage for stage in STAGES if stage != "sft" or recipe.sft is not None]
    learnt = [stage for stage in TRAINING if stage in stages]
    training = {stage: figures for stage in learnt if (figures := training_figures(run, stage)) is not None}
    bits = {model: result["total"]["bits_per_byte"] for model, result in (heldout or {}).items()}
    return {
        "name": recipe.name,
        "code_version": code_version,
        "written": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": describe_machine().line(),
        "model": _model(run, learnt),
        "headline": {"bits_per_byte": bits, "choices": choices},
        "training": training,
        "heldout": heldout,
        "choices": choices,
        "answers": results.get("answers"),
        "not_measured": results.get("not_measured", {}),
        "samples": results.get("samples", []),
        "corpus": _json(run.path / "corpus" / "text" / "report.json"),
        "plan": _json(run.path / "plan.json"),
        "measured": measured(run, stages, training),
        "stages": [asdict(manifest) for stage in stages if (manifest := run.stage(stage).manifest()) is not None],
        "recipe": recipe.model_dump(mode="json"),
    }


def training_figures(run: RunDirectory, stage: str) -> dict[str, Any] | None:
    """Totals and curve of a training stage, from its metrics.jsonl and newest checkpoint; None when it has none."""
    records = read_metrics(run.path / stage / "metrics.jsonl")
    state = _json(run.checkpoints(stage) / "last" / "training" / "state.json")
    train = [record for record in records if record["kind"] == "train"]
    if state is None or not train:
        return None
    measured = [record for record in records if record["kind"] == "heldout" and record["loss"] is not None]
    # what was measured over as much text as the last one: losses over other text are no part of one curve
    heldout = [record for record in measured if record["targets"] == measured[-1]["targets"]]
    # the first update may hold the time of compiling, and would be the one low point of the curve of speed
    steady = [record for record in train if record["step"] > 1] or train
    return {
        "steps": state["step"],
        "tokens": state["tokens"],
        "seconds": state["seconds"],
        "tokens_per_second": median(record["tokens_per_second"] for record in steady),
        # of the device, where that has memory of its own, as in the plan
        "peak_memory_bytes": max(r.get("device_memory_mb", r["peak_memory_mb"]) for r in train) * 10**6,
        "best_heldout_loss": min((record["loss"] for record in heldout), default=None),
        "spikes": sum(record["kind"] == "spike" for record in records),
        "chosen": state["choices"],
        "curve": {
            "steps": _column(train, "step"),
            "loss": _column(train, "loss"),
            "learning_rate": _column(train, "learning_rate"),
            "gradient_norm": _column(train, "gradient_norm"),
            "speed": {"steps": _column(steady, "step"), "tokens_per_second": _column(steady, "tokens_per_second")},
            "heldout": {"steps": _column(heldout, "step"), "loss": _column(heldout, "loss")},
        },
    }


def measured(run: RunDirectory, stages: Sequence[str], training: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """What the stages took: seconds (of training over all attempts, else of the last one), peak memory in bytes."""
    manifests = {stage: run.stage(stage).manifest() for stage in stages}
    done = {stage: manifest for stage, manifest in manifests.items() if manifest is not None}
    seconds = {
        stage: training[stage]["seconds"] if stage in training else manifest.wall_seconds
        for stage, manifest in done.items()
    }
    memory = {stage: float(training[stage]["peak_memory_bytes"]) for stage in done if stage in training}
    if seconds:
        seconds["whole run"] = sum(seconds.values())
        on_device = any(figures["chosen"]["device"] == "cuda" for figures in training.values())
        ours = [float(manifest.peak_memory_mb * 10**6) for manifest in done.values() if not on_device]
        memory["whole run"] = max([*memory.values(), *ours])
    return {"seconds": seconds, "peak_memory_bytes": memory}


def _model(run: RunDirectory, stages: Sequence[str]) -> dict[str, Any] | None:
    """Sizes of the newest checkpoint's model, and its parameters by part."""
    for stage in reversed(stages):
        plain = _json(run.checkpoints(stage) / "last" / "config.json")
        if plain is not None:
            config = ModelConfig.from_hf(plain)
            parts = parameters_by_part(config)
            sizes = {name: getattr(config, name) for name in _SIZES}
            return {
                **sizes,
                "architecture": plain["architectures"][0],
                "parameters": {**asdict(parts), "total": parts.total},
            }
    return None


def _column(records: list[dict[str, Any]], key: str) -> list[Any]:
    return [record[key] for record in records]


def _json(path: Path) -> dict[str, Any] | None:
    """A JSON file's content; None when there is none. A file that is there and not whole is a fault, and raises."""
    if not path.exists():
        return None
    value: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return value
