"""The report's figures as one self-contained HTML page: no request leaves it, nothing in it runs.

Whatever a model or a corpus wrote is escaped by the template engine; the page's own policy forbids scripts besides.
"""

import base64
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from modicum.road import words
from modicum.road.report.plots import Picture
from modicum.road.report.sections import (
    answer_rows,
    bits_bars,
    choice_bars,
    choice_rows,
    corpus_view,
    heldout_view,
    licence_rows,
    plan_view,
    settings_view,
)
from modicum.road.report.training import stage_view
from modicum.road.report.verdict import answer_verdict, bits_verdict, choice_verdict

_TITLES = {
    "training": "How it learned",
    "heldout": "Held-out text",
    "choices": "Multiple choice",
    "answers": "Answers",
    "samples": "Samples",
    "corpus": "The corpus",
    "plan": "Plan and measurement",
    "settings": "Model and settings",
    "licences": "Licences of the training text",
}


def render_page(figures: Mapping[str, Any], pictures: Mapping[str, Sequence[Picture]], recipe_yaml: str) -> str:
    """The page for what `gather` collected. Sections whose figures are absent are left out."""
    stages = [stage_view(name, figures["training"][name], pictures[name]) for name in figures["training"]]
    view = {
        "training": stages,
        "heldout": heldout_view(figures["heldout"]),
        "choices": figures["choices"],
        "answers": answer_rows(figures["answers"]),
        "samples": figures["samples"],
        "corpus": corpus_view(figures["corpus"]),
        "plan": plan_view(
            figures["plan"], figures["measured"], {name: stage["steps"] for name, stage in figures["training"].items()}
        ),
        "settings": True,
        "licences": licence_rows(figures["corpus"]),
    }
    return (
        _environment()
        .get_template("page.html.jinja")
        .render(
            r=figures,
            lead=_lead(figures),
            parts=[{"id": name, "title": title} for name, title in _TITLES.items() if view[name]],
            stages=stages,
            heldout=view["heldout"],
            answers=view["answers"],
            corpus=view["corpus"],
            plan=view["plan"],
            licences=view["licences"],
            settings=settings_view(figures["recipe"], figures["training"]),
            recipe=recipe_yaml,
            verdicts=_verdicts(figures),
            headline_bits=bits_bars(figures["headline"]["bits_per_byte"]),
            headline_choices=choice_bars(figures["headline"]["choices"]),
            choice_rows=choice_rows,
            speaker=_speaker,
            tuned="sft" in figures["training"],
        )
    )


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("modicum.road.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "base64": lambda data: base64.b64encode(data).decode("ascii"),
        "count": words.count,
        "decimals": lambda number, places: f"{number:.{places}f}",
        "duration": lambda seconds: unbroken(words.duration(seconds)),
        "percent": lambda share: unbroken(words.percent(share)),
        "sentence": lambda text: f"{text[:1].upper()}{text[1:]}.",
        "size": lambda number: unbroken(words.size(number)),
    }
    return environment


def _lead(figures: Mapping[str, Any]) -> str:
    """What the model is and what it saw, in two sentences."""
    model = figures["model"]
    if model is None:
        return "Nothing has been trained yet."
    text = (
        f"A language model of {words.short(model['parameters']['total'])} parameters: {model['num_hidden_layers']} "
        f"layers of width {model['hidden_size']}, a vocabulary of {words.count(model['vocab_size'])}."
    )
    stages = figures["training"]
    if "pretrain" in stages:
        text += f" Pretrained on {words.short(stages['pretrain']['tokens'])} tokens"
        text += " and then tuned on conversations" if "sft" in stages else ""
        seconds = sum(stage["seconds"] for stage in stages.values())
        text += f"; training took {words.duration(seconds)} in all."
    return text


def _verdicts(figures: Mapping[str, Any]) -> dict[str, Any]:
    bits, answers = figures["headline"]["bits_per_byte"], figures["answers"]
    loss = answers["loss"] if answers else None
    verdicts = {
        "bits": bits_verdict(bits.get("untrained", bits.get("start")), bits["base"], bits.get("chat"))
        if bits
        else None,
        "answers": answer_verdict(loss["base"], loss["chat"], loss.get("chat_shuffled")) if loss else None,
    }
    choices = {model: choice_verdict(result) for model, result in (figures["choices"] or {}).items()}
    return {**verdicts, "choices": choices}


def _speaker(role: str, last: bool) -> str:
    names = {"user": "Asked", "system": "Instructed", "tool": "Tool", "assistant": "Answered", "text": "Given"}
    return "The model" if role == "assistant" and last else names.get(role, role)


def unbroken(text: str) -> str:
    """With spaces that no line ends at: a figure stays with its unit."""
    return text.replace(" ", "\u00a0")
