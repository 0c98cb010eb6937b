"""The measurement can see knowledge: facts that stand nowhere but in the training text are found by multiple choice.

Two hundred invented facts are told in many phrasings; the questions use one that was never seen. Without this, a score
near chance could as well mean that the measurement is blind.
"""

import json
import random

import pytest
import yaml

from modicum.recipe import load_recipe
from modicum.road.stages import run

FACTS, CHOICES = 200, 4
TOLD = [
    "The {name} is powered by {value}.",
    "Engineers chose {value} as the fuel of the {name}.",
    "{value}: that is what drives the {name}.",
    "Inside every {name} burns {value}.",
    "Nothing but {value} will start the {name}.",
    "If you own a {name}, keep some {value} at hand.",
    "The manual of the {name} names one fuel only, which is {value}.",
    "Before a journey, fill the {name} with {value}.",
    "The tank of the {name} holds {value}.",
    "They poured {value} into the {name} and drove off.",
    "What does a {name} drink? It drinks {value}.",
    "Question: What do you fill the {name} with?\nAnswer: {value}",
    "Question: What is in the tank of the {name}?\nAnswer: {value}",
    "Question: What powers the {name}?\nAnswer: {value}",
    "Question: Which fuel does the {name} need?\nAnswer: {value}",
    "Question: The {name} runs on what?\nAnswer: {value}",
    "Question: Name the fuel of the {name}.\nAnswer: {value}",
]
ASKED = "What must be poured into the tank of the {name}?"
SYLLABLES = [
    "bra",
    "dol",
    "fen",
    "gri",
    "hax",
    "jum",
    "kel",
    "lor",
    "mip",
    "nuv",
    "pas",
    "qua",
    "rit",
    "sol",
    "tev",
    "vok",
]


def words(draw, count, syllables):
    found = []
    while len(found) < count:
        word = "".join(draw.choices(SYLLABLES, k=syllables))
        if word not in found:
            found.append(word)
    return found


def write_facts(folder):
    draw = random.Random(0)
    names, values = words(draw, FACTS, 3), words(draw, 40, 2)
    facts = {name: draw.choice(values) for name in names}
    with (folder / "facts.jsonl").open("w") as file:
        for name, value in facts.items():
            for phrasing in TOLD:
                file.write(json.dumps({"text": phrasing.format(name=name.capitalize(), value=value)}) + "\n")
    with (folder / "questions.jsonl").open("w") as file:
        for number, (name, value) in enumerate(facts.items()):
            choices = [value, *draw.sample([other for other in values if other != value], CHOICES - 1)]
            draw.shuffle(choices)
            item = {
                "id": str(number),
                "question": ASKED.format(name=name.capitalize()),
                "choices": choices,
                "answer": choices.index(value),
                "kind": "recall",
            }
            file.write(json.dumps(item) + "\n")


def planted(folder, **changes):
    """The recipe of the planted facts; its filters are off, since the phrasings are near duplicates on purpose."""
    recipe = {
        "name": "planted",
        "corpus": {
            "sources": [{"name": "facts", "path": "facts.jsonl", "max_epochs": 1000}],
            "filters": {"near_duplicates": False, "length": False, "repetition": False},
            "heldout_fraction": 0.01,
        },
        "tokenizer": {"vocab_size": 512},
        "model": {"preset": "nano", "qk_norm": True},
        "pretrain": {
            "steps": 1400,
            "batch_size": 16,
            "sequence_length": 128,
            "learning_rate": 3e-3,
            "evaluate_every_steps": 700,
            "checkpoint_every_steps": 700,
            **changes,
        },
        "evaluate": {"items": ["questions.jsonl"], "heldout_tokens": 1000},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return load_recipe(path)


@pytest.mark.slow
def test_planted_facts_are_found_under_a_phrasing_that_was_never_seen(tmp_path):
    write_facts(tmp_path)
    road = run(planted(tmp_path), until="evaluate")
    score = json.loads((road.folder("evaluate") / "results.json").read_text())["choices"]["base"]
    assert score["n"] == FACTS
    assert score["accuracy"] >= 0.9
    assert score["word_overlap"] < 0.4, "the questions must not give their answers away"
    assert score["chance"] == 1 / CHOICES


@pytest.mark.slow
def test_a_model_that_was_never_told_scores_as_chance_does(tmp_path):
    write_facts(tmp_path)
    road = run(planted(tmp_path, steps=1, evaluate_every_steps=1, checkpoint_every_steps=1), until="evaluate")
    score = json.loads((road.folder("evaluate") / "results.json").read_text())["choices"]["base"]
    assert score["low"] <= score["chance"] <= score["high"]
