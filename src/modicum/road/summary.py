"""What a run has come to, in the lines that a person reads when it ends."""

import json

from modicum.road.context import Road
from modicum.road.measure import RESULTS, is_of_these_models


def summary(road: Road) -> str:
    """Bits per byte before and after, accuracy beside chance, samples, and the paths; empty before there are any."""
    path = road.folder("evaluate") / RESULTS
    lines = []
    if path.exists() and not is_of_these_models(road):
        lines.append("what was measured are earlier models; `modicum run RECIPE` measures these")
    elif path.exists():
        results = json.loads(path.read_text("utf-8"))
        lines += _bits(results["heldout"]) + _choices(results["choices"])
        lines += [f"{name}: not measured: {reason}" for name, reason in results.get("not_measured", {}).items()]
        lines += _samples(results["samples"])
    for name, stage in (("chat model", "sft"), ("base model", "pretrain")):
        last = road.run.checkpoints(stage) / "last"
        if last.exists() and (stage != "sft" or road.recipe.sft is not None):
            lines.append(f"{name + ':':12} {last}")
    page = road.folder("report") / "index.html"
    if page.exists():
        lines.append(f"{'report:':12} {page}")
    return "\n".join(lines)


def _bits(heldout: dict[str, dict[str, dict[str, float]]]) -> list[str]:
    if not heldout:
        return []
    figures = ", ".join(f"{name} {bits['total']['bits_per_byte']:.3f}" for name, bits in heldout.items())
    return [f"held-out bits per byte: {figures}"]


def _choices(choices: dict[str, dict[str, float]]) -> list[str]:
    return [
        f"multiple choice, {name}: {score['accuracy']:.1%} of {score['n']} right ({score['low']:.1%} to "
        f"{score['high']:.1%}); chance {score['chance']:.1%}"
        for name, score in choices.items()
    ]


def _samples(samples: list[dict[str, list[dict[str, str]]]]) -> list[str]:
    lines = [""]
    for sample in samples:
        lines += [f"{message['role']}: {message['content'].strip()}" for message in sample["messages"]]
        lines.append("")
    return lines
