"""A training stage's metrics.jsonl as a curve, totals, and a sentence."""

from collections.abc import Mapping, Sequence
from typing import Any

from modicum.road import words
from modicum.road.report.plots import Picture, smooth

_TITLES = {"pretrain": "Pretraining", "sft": "Fine-tuning on conversations"}


def stage_view(name: str, stage: Mapping[str, Any], pictures: Sequence[Picture]) -> dict[str, Any]:
    """What the page says of one training stage."""
    curve = stage["curve"]
    sentence = (
        f"{words.count(stage['steps'])} updates, {words.short(stage['tokens'])} tokens, "
        f"{words.duration(stage['seconds'])}; {words.count(stage['tokens_per_second'])} tokens a second at the median"
    )
    if stage["peak_memory_bytes"]:
        sentence += f", at most {words.size(stage['peak_memory_bytes'])} of memory"
    if curve["loss"]:
        sentence += f". Training loss {curve['loss'][0]:.2f} at first, {smooth(curve['loss'])[-1]:.2f} at the end"
    if stage["best_heldout_loss"] is not None:
        sentence += f"; held-out loss {stage['best_heldout_loss']:.3f} at its best (nats a token)"
    return {"title": _TITLES.get(name, name), "sentence": f"{sentence}.", "pictures": pictures}
