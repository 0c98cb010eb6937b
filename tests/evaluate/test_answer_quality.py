"""How a model answers, measured on answers that are known."""

import json

import pytest

from modicum.corpus import Conversation
from modicum.evaluate import answer_quality
from modicum.evaluate.quality import distinct, repeated
from modicum.generate import Completion, Generator
from modicum.store import UserError


def conversation(question, answer):
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return Conversation(messages, "file:1", None, None)


@pytest.fixture
def answering(model, tokenizer, monkeypatch):
    """A generator that gives the answers it is told, in turn: (text, whether it stops)."""

    def build(*answers):
        generator = Generator(model, tokenizer, stop_ids=[tokenizer.eot_id, tokenizer.end_of_turn_id])

        def generate(prompts, params, **_):
            assert params.temperature == 0
            completions = []
            for _, (text, stops) in zip(prompts, answers, strict=True):
                ids = tokenizer.encode(text) + [tokenizer.end_of_turn_id] * stops
                completions.append(Completion(ids, text, "stop" if stops else "length", [0.0] * len(ids)))
            return completions

        monkeypatch.setattr(generator, "generate", generate)
        return generator

    return build


def test_known_answers_give_known_figures(answering, tokenizer):
    talks = [conversation(f"{n}?", "one two three four") for n in range(4)]
    generator = answering(("one two three four", True), ("", True), (" \n", True), ("one two " * 8, False))
    found = answer_quality(generator, talks)
    wanted = len(tokenizer.encode("one two three four"))
    lengths = sorted([wanted, 0, len(tokenizer.encode(" \n")), len(tokenizer.encode("one two " * 8))])
    assert (found.stop_rate, found.empty_rate, found.prompts) == (0.75, 0.5, 4)
    assert found.median_length == (lengths[1] + lengths[2]) / 2
    assert found.median_reference_length == wanted
    assert found.median_length_ratio == pytest.approx(found.median_length / wanted)
    assert found.repeated_4grams > 0
    assert found.repeated_4grams_reference == 0


def test_references_are_cut_where_answers_are(answering, tokenizer):
    """Else a model that never stops would look brief and varied beside long references."""
    long = "one two three four " + "again and again " * 20
    limit = len(tokenizer.encode("one two three four"))
    talks = [conversation(f"{n}?", long) for n in range(3)]
    found = answer_quality(answering(*[("one two three four", False)] * 3), talks, max_new_tokens=limit)
    assert (found.median_length_ratio, found.repeated_4grams_reference) == (1.0, 0.0)
    assert found.median_reference_length == len(tokenizer.encode(long.strip())) > limit


def test_repetition_and_distinctness_are_counted_by_hand():
    assert repeated([[1, 2, 3, 4, 1, 2, 3, 4]], 4) == pytest.approx(1 / 5)
    assert repeated([[5] * 10], 4) == pytest.approx(6 / 7)
    assert repeated([[1, 2, 3, 4], [1, 2, 3, 4]], 4) == 0
    assert distinct([[1, 2, 1], [1, 2]], 1) == pytest.approx(2 / 5)
    assert distinct([[1, 2, 1], [1, 2]], 2) == pytest.approx(2 / 3)
    assert (repeated([[1]], 4), distinct([[]], 2)) == (0.0, 0.0)


def test_samples_show_prompt_answer_and_reference(answering):
    talks = [conversation("one?", "yes"), conversation("two?", "no")]
    found = answer_quality(answering(("A", True), ("B", False)), talks, samples=2)
    assert {sample.messages[0]["content"]: sample.reference for sample in found.samples} == {
        "one?": "yes",
        "two?": "no",
    }
    assert [(sample.answer, sample.finish_reason) for sample in found.samples] == [("A", "stop"), ("B", "length")]


def test_the_seed_draws_the_prompts(model, tokenizer):
    generator = Generator(model, tokenizer, stop_ids=[tokenizer.end_of_turn_id])
    talks = [conversation(f"{n}?", "yes") for n in range(30)]

    def drawn(seed):
        found = answer_quality(generator, talks, prompts=5, max_new_tokens=4, seed=seed)
        return [sample.messages[0]["content"] for sample in found.samples]

    assert len(set(drawn(0))) == 5
    assert drawn(0) == drawn(0)
    assert drawn(0) != drawn(1)


def test_prompts_without_room_for_an_answer_are_left_out_and_counted(model, tokenizer):
    generator = Generator(model, tokenizer, stop_ids=[tokenizer.end_of_turn_id])
    found = answer_quality(generator, [conversation("a?", "yes"), conversation("long " * 40, "yes")], max_new_tokens=20)
    assert (found.prompts, found.too_long) == (1, 1)
    with pytest.raises(UserError, match="none of 1 held-out prompts leaves room"):
        answer_quality(generator, [conversation("long " * 40, "yes")])
    with pytest.raises(UserError, match="none of 0 held-out prompts"):
        answer_quality(generator, [])


def test_every_figure_is_finite_plain_json(model, tokenizer):
    generator = Generator(model, tokenizer, stop_ids=[tokenizer.end_of_turn_id])
    plain = answer_quality(generator, [conversation("a?", "yes")], max_new_tokens=8).to_dict()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
