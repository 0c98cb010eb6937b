"""Tables of the page from the figures: rows in the order in which they are read, totals last."""

from collections.abc import Mapping
from math import isclose
from typing import Any

from modicum.road import words


def heldout_view(heldout: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Bits per byte of each domain, a column for each model."""
    if not heldout:
        return None
    models = list(heldout)
    first = heldout[models[-1]]
    rows = [_heldout_row(name, [heldout[model]["domains"].get(name) for model in models]) for name in first["domains"]]
    rows.sort(key=lambda row: -row["bytes"])
    if len(rows) > 1:
        rows.append(_heldout_row("all", [heldout[model]["total"] for model in models]) | {"total": True})
    return {"models": models, "rows": rows, "intervals": first["total"].get("low") is not None}


def _heldout_row(name: str, values: list[dict[str, Any] | None]) -> dict[str, Any]:
    last = next(value for value in reversed(values) if value)
    return {"name": name, "documents": last["documents"], "bytes": last["bytes"], "values": values, "total": False}


def bits_bars(bits: Mapping[str, float]) -> list[dict[str, Any]]:
    """The headline's bars: one a model."""
    return [_bar(name, value, f"{value:.2f}", main=name == "base") for name, value in bits.items()]


def choice_bars(choices: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """The headline's bars: the last model with its interval, and what needs no model."""
    if not choices:
        return []
    model, result = list(choices.items())[-1]
    rows = [_bar(model, result["accuracy"], words.percent(result["accuracy"]), main=True, span=result)]
    for name, key in (("chance", "chance"), ("commonest answer", "majority"), ("shared words", "word_overlap")):
        rows.append(_bar(name, result[key], words.percent(result[key])))
    return rows


def _bar(
    name: str, value: float, text: str, *, main: bool = False, span: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    low, high = (span["low"], span["high"]) if span else (None, None)
    return {"name": name, "value": value, "text": text, "main": main, "low": low, "high": high, "most": high or value}


def choice_rows(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A multiple-choice score by kind, by source, and over all questions."""
    rows = [{**score, "name": name, "total": False} for name, score in result["per_kind"].items()]
    if len(result["per_source"]) > 1:
        rows += [{**score, "name": f"from {name}", "total": False} for name, score in result["per_source"].items()]
    return [*rows, {**result, "name": "all", "total": True}]


def answer_rows(answers: Mapping[str, Any] | None) -> list[tuple[str, str]] | None:
    """What was counted in the answers, as (name, value)."""
    if not answers:
        return None
    quality, loss = answers["chat"], answers["loss"]
    return [*(_quality_rows(quality) if quality else []), *(_loss_rows(loss) if loss else [])]


def _quality_rows(quality: Mapping[str, Any]) -> list[tuple[str, str]]:
    cut = f"cut to {quality['max_new_tokens']} tokens"
    return [
        ("Prompts", words.count(quality["prompts"])),
        (f"Ended by themselves within {quality['max_new_tokens']} tokens", words.percent(quality["stop_rate"])),
        ("Empty", words.percent(quality["empty_rate"])),
        ("Median length", f"{quality['median_length']:.0f} tokens"),
        ("Median length of the references", f"{quality['median_reference_length']:.0f} tokens"),
        (f"Median of length by the reference’s, {cut}", f"{quality['median_length_ratio']:.2f}"),
        ("Four tokens in a row that the answer had before", words.percent(quality["repeated_4grams"])),
        (f"The same in the references, {cut}", words.percent(quality["repeated_4grams_reference"])),
        ("Different tokens of all tokens, different pairs of all pairs", _distinct(quality)),
    ]


def _loss_rows(loss: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        ("Loss on the reference answers, base model", _nats(loss["base"])),
        ("Loss on the reference answers, chat model", _nats(loss["chat"])),
        *([("The same after the prompts of others", _nats(loss["chat_shuffled"]))] if "chat_shuffled" in loss else []),
    ]


def _distinct(quality: Mapping[str, Any]) -> str:
    return f"{words.percent(quality['distinct_1'])}, {words.percent(quality['distinct_2'])}"


def _nats(loss: Mapping[str, Any]) -> str:
    said = f"{loss['nats_per_token']:.3f} nats a token"
    return said if loss["low"] is None else f"{said} ({loss['low']:.3f} to {loss['high']:.3f})"


def corpus_view(corpus: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Documents by source: read, dropped by reason, kept, held out."""
    if not corpus:
        return None
    sources = corpus["sources"]
    reasons = [reason for reason in dict.fromkeys(r for s in sources for r in s["dropped"])]
    rows = [_corpus_row(source["name"], [source], reasons) for source in sources]
    whole = _corpus_row("all", sources, reasons)
    rows += [whole | {"total": True}] if len(rows) > 1 else []
    dropped = sum(whole["dropped"])
    sentence = (
        f"{words.count(whole['read'])} documents were read; {words.count(dropped)} were dropped, "
        f"{words.count(whole['train'])} ({words.size(whole['train_bytes'])}) went into training, and "
        f"{words.count(whole['heldout'])} ({words.size(whole['heldout_bytes'])}) were held out for evaluation."
    )
    return {"sentence": sentence, "reasons": reasons, "rows": rows, "warnings": corpus["warnings"]}


def _corpus_row(name: str, sources: list[Mapping[str, Any]], reasons: list[str]) -> dict[str, Any]:
    def total(key: str) -> int:
        return sum(source[key] for source in sources)

    return {
        "name": name,
        "read": total("documents_in"),
        "dropped": [sum(source["dropped"].get(reason, 0) for source in sources) for reason in reasons],
        "train": total("documents_kept"),
        "train_bytes": total("bytes_kept"),
        "heldout": total("documents_heldout"),
        "heldout_bytes": total("bytes_heldout"),
        "total": False,
    }


def licence_rows(corpus: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """The licences that documents named, those with most text first."""
    found: dict[str, dict[str, Any]] = {}
    for source in corpus["sources"] if corpus else ():
        for licence, counts in source["licences"].items():
            row = found.setdefault(licence, {"name": licence, "documents": 0, "bytes": 0, "sources": []})
            row["documents"] += counts["documents"]
            row["bytes"] += counts["bytes"]
            row["sources"].append(source["name"])
    return sorted(found.values(), key=lambda row: (-row["bytes"], row["name"]))


_SETTINGS = (
    "batch_size",
    "sequence_length",
    "optimizer",
    "learning_rate",
    "schedule",
    "warmup_fraction",
    "decay_fraction",
    "weight_decay",
    "betas",
    "clip_norm",
    "separate_documents",
    "dtype",
    "compile",
)


def settings_view(recipe: Mapping[str, Any], stages: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the training stages side by side; those measured at the start as they were chosen."""
    named = [stage for stage in stages if recipe.get(stage)]
    rows = []
    for name in _SETTINGS:
        values = [stages[stage]["chosen"].get(name, recipe[stage][name]) for stage in named]
        rows.append((name.replace("_", " "), [_plain(value) for value in values]))
    return {"stages": named, "rows": rows if named else []}


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(_plain(item) for item in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def plan_view(
    plan: Mapping[str, Any] | None, measured: Mapping[str, Any], made: Mapping[str, int]
) -> dict[str, Any] | None:
    """What was planned beside what was used, in time and memory, for what was measured.

    made: updates of each training stage. One that stopped early, or went on for longer than was planned, is held
    against no plan, nor is the whole run then; the updates of fine-tuning are planned by an estimate.
    """
    if not plan:
        return None
    rows = []
    planned = {stage["name"]: stage["steps"] for stage in plan["stages"]}
    other = {name for name, steps in made.items() if not isclose(planned.get(name) or 0, steps, rel_tol=0.1, abs_tol=1)}
    if other:
        other.add("whole run")
    for key, name, unit in (("seconds", "time", words.duration), ("peak_memory_bytes", "memory", words.size)):
        for stage, used in measured[key].items():
            said = None if stage in other else plan[key].get(stage)
            rows.append(
                {
                    "name": f"{stage}, {name}",
                    "planned": unit(said) if said else None,
                    "measured": unit(used),
                    "off": f"{(said / used - 1) * 100:+.0f} %".replace("-", "−") if said and used else None,
                }
            )
    return {"rows": rows, "how": plan["how"]}
