"""What tests generalisation is kept out of fine-tuning as out of the corpus."""

import json

from modicum.recipe import load_recipe
from modicum.road.context import Road
from modicum.road.stages import run
from modicum.road.training import sft_inputs


def ask(path, question, kind):
    item = {"id": "one", "question": question, "choices": ["yes", "no"], "answer": 0, "kind": kind, "source": "test"}
    path.write_text(json.dumps(item) + "\n")


def test_a_question_that_is_to_be_unseen_stands_in_no_conversation_and_another_one_tunes_anew(tiny, tmp_path):
    recipe, questions = load_recipe(tiny()), tmp_path / "questions.jsonl"
    talks = [json.loads(line)["messages"] for line in (tmp_path / "talk.jsonl").read_text().splitlines()]
    asked = max((talk[-1]["content"] for talk in talks), key=lambda text: len(text.split()))
    ask(questions, asked, "generalisation")
    road = run(recipe, until="sft")
    report = json.loads((road.folder("sft") / "conversations.json").read_text())
    assert report["contaminated"]["conversations"] >= 1
    assert report["contaminated"]["first"].startswith(str(tmp_path / "talk.jsonl"))
    unseen = sft_inputs(road)
    ask(questions, "Is another question asked in its place?", "generalisation")
    assert sft_inputs(Road(recipe)) != unseen
    ask(questions, asked, "recall")
    assert "evaluate.items" not in sft_inputs(Road(recipe)), "what the text is to teach is not kept out"
