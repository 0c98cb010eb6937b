"""Choices are scored as a naive loop would score them, one at a time, from the text up."""

import json

import pytest
import torch

from modicum.corpus import Choice, read_choices
from modicum.evaluate import multiple_choice
from modicum.evaluate.choice import chat_choice, marks, plain_choice
from modicum.model import Decoder, ModelConfig
from modicum.store import UserError


def item(number, question, choices, answer, kind="recall", source="s"):
    return Choice(f"i{number}", question, choices, answer, kind, source)


ITEMS = [
    item(0, "What is it?", ["a cat", "Naïve café", "x"], 0),
    item(1, "Which one?", ["SQL", "a rather long answer"], 1, "generalisation"),
    item(2, "How many?", ["1", "22", "333", "4444"], 2, "recall", "t"),
    item(3, "Which of these is it?", ["Use After Free", "(none)", "x"], 2, "generalisation", "t"),
]


@pytest.fixture(scope="module")
def naive(tokenizer, reference):
    """(accuracy per byte, accuracy by the sum), from rendered text, without batches."""

    def scores(items, chat):
        hits = [0, 0]
        for one in items:
            sums, sizes = [], []
            for choice in one.choices:
                if chat:
                    messages = [{"role": "user", "content": one.question}, {"role": "assistant", "content": choice}]
                    rendered = tokenizer.render(messages)
                    ids = rendered.ids
                    places = [i for i, mine in enumerate(rendered.assistant_mask) if mine and ids[i] != 3]
                else:
                    before = f"Question: {one.question}\nAnswer:"
                    ids = [0, *tokenizer.encode(f"{before} {choice}")]
                    places = list(range(1 + len(tokenizer.encode(before)), len(ids)))
                assert tokenizer.decode([ids[i] for i in places]).strip() == choice
                logprobs = reference(ids)
                sums.append(sum(logprobs[i - 1] for i in places))
                sizes.append(len(choice.encode()))
            per_byte = [a / b for a, b in zip(sums, sizes, strict=True)]
            hits[0] += per_byte.index(max(per_byte)) == one.answer
            hits[1] += sums.index(max(sums)) == one.answer
        return [hit / len(items) for hit in hits]

    return scores


@pytest.mark.parametrize("chat", [True, False])
def test_scores_are_those_of_a_naive_loop(model, tokenizer, naive, chat):
    many = [item(n, f"Question {n}?", ["alpha", "beta gamma", "d", "epsilon zeta eta"], n % 4) for n in range(24)]
    found = multiple_choice(model, tokenizer, [*ITEMS, *many], chat=chat, bootstrap_samples=100)
    per_byte, by_sum = naive([*ITEMS, *many], chat)
    assert found.accuracy == pytest.approx(per_byte)
    assert found.accuracy_unnormalised == pytest.approx(by_sum)
    assert per_byte != by_sum
    assert 0 < per_byte < 1


def test_likelihood_is_shared_among_the_bytes_of_a_choice_not_its_characters():
    """Six bytes at -1 each beat two at -2 each; by characters, and by the plain sum, it is the other way round."""
    one = item(0, "?", ["\u65e5\u672c", " ab "], 0)
    assert marks(one, [-6.0, -4.0]) == (1.0, 0.0)


def test_the_choice_of_a_chat_model_is_the_assistants_content(tokenizer):
    scored = chat_choice(tokenizer, "What is it?", " a cat ")
    assert tokenizer.decode(scored.ids[scored.start :]) == "a cat"
    assert tokenizer.decode(scored.ids[: scored.start]).endswith("<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("opening", ["<think>\n\n</think>\n\n", "<think></think>", "<think>A final one</think>", ""])
def test_what_a_template_opens_an_answer_with_is_not_scored_as_the_choice(tokenizer, opening):
    """As Qwen3's, which writes an empty thought before an answer and none into the prompt."""
    turn = (
        "{{ '<|im_start|>' + m.role + '\n' + (opening if m.role == 'assistant' else '') + m.content + '<|im_end|>\n' }}"
    )
    opening = opening.replace("<think>", "<|reserved_0|>").replace("</think>", "<|reserved_1|>")
    opened = tokenizer.with_template(
        f"{{% set opening = {opening!r} %}}{{% for m in messages %}}{turn}{{% endfor %}}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    scored = chat_choice(opened, "What is it?", "A")
    assert opened.decode(scored.ids[scored.start :]).strip() == "A"
    before = tokenizer.encode_with_control(f"<|im_start|>assistant\n{opening.rstrip()}")
    assert scored.ids[scored.start - len(before) : scored.start] == before


def test_a_template_that_writes_no_answer_cannot_be_judged_by_choices(tokenizer):
    silent = tokenizer.with_template(
        "{% for m in messages %}<|im_start|>{{ m.content if m.role == 'user' else '' }}<|im_end|>{% endfor %}"
    )
    with pytest.raises(UserError, match="writes nothing of an assistant's answer"):
        chat_choice(silent, "What is it?", "A")


@pytest.mark.parametrize("choice", ["a cat", "5", "(none)", "\u65e5\u672c", "-x", "'quoted'", " spaced "])
def test_the_tokens_of_a_plain_choice_are_those_it_has_in_context(tokenizer, choice):
    scored = plain_choice(tokenizer, "What is it?", choice)
    assert scored.ids[0] == tokenizer.eot_id
    assert scored.ids[1:] == tokenizer.encode(f"Question: What is it?\nAnswer: {choice.strip()}")
    assert tokenizer.decode(scored.ids[scored.start :]) == f" {choice.strip()}"


def test_a_text_with_control_literals_stays_text(tokenizer):
    scored = chat_choice(tokenizer, "<|im_end|>", "<|im_end|>")
    assert scored.ids.count(tokenizer.end_of_turn_id) == 1
    assert tokenizer.decode(scored.ids[scored.start :]) == "<|im_end|>"


def test_kinds_and_sources_add_up(model, tokenizer):
    found = multiple_choice(model, tokenizer, ITEMS, chat=True, bootstrap_samples=50)
    assert {name: part.n for name, part in found.per_kind.items()} == {"recall": 2, "generalisation": 2}
    assert {name: part.n for name, part in found.per_source.items()} == {"s": 2, "t": 2}
    for parts in (found.per_kind, found.per_source):
        assert sum(part.n * part.accuracy for part in parts.values()) == pytest.approx(found.n * found.accuracy)
        assert sum(part.n * part.chance for part in parts.values()) == pytest.approx(found.n * found.chance)
    assert found.chance == pytest.approx((1 / 3 + 1 / 2 + 1 / 4 + 1 / 3) / 4)


def test_items_without_a_source_are_counted_as_unnamed(model, tokenizer):
    found = multiple_choice(model, tokenizer, [item(0, "?", ["a", "b"], 0, source=None)], chat=False)
    assert list(found.per_source) == ["unnamed"]


def test_a_model_that_knows_is_right_and_one_that_knows_the_opposite_is_wrong(model, tokenizer):
    """The answer's tokens get all the mass: accuracy 1 with the gold answer, 0 with another."""
    knowing = Decoder(ModelConfig(**{**vars(model.config), "tie_word_embeddings": False}))
    with torch.no_grad():
        for layer in knowing.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        knowing.model.embed_tokens.weight.fill_(1.0)
        knowing.lm_head.weight.zero_()
        knowing.lm_head.weight[tokenizer.encode("right")] = 1.0
    items = [item(n, f"{n}?", ["wrong", "right", "odd"], 1) for n in range(5)]
    right = multiple_choice(knowing, tokenizer, items, chat=True)
    assert (right.accuracy, right.high) == (1.0, 1.0)
    assert right.low < 0.5, "five questions are few"
    other = [item(n, f"{n}?", ["wrong", "right", "odd"], 0) for n in range(5)]
    assert multiple_choice(knowing, tokenizer, other, chat=True).accuracy == 0.0


def test_items_longer_than_the_context_are_left_out_and_counted(model, tokenizer):
    long = item(9, "long " * 100, ["a", "b"], 0, "generalisation", "u")
    found = multiple_choice(model, tokenizer, [*ITEMS, long], chat=True)
    assert (found.n, found.too_long) == (4, 1)
    assert found.per_kind["generalisation"].too_long == 1
    assert "u" not in found.per_source
    with pytest.raises(UserError, match="none of the 1 multiple-choice items fits into the context of 64 tokens"):
        multiple_choice(model, tokenizer, [long], chat=True)


def test_no_items_are_refused(model, tokenizer):
    with pytest.raises(UserError, match="no multiple-choice items"):
        multiple_choice(model, tokenizer, [], chat=True)


def test_the_interval_holds_the_accuracy_and_the_seed_decides_it(model, tokenizer):
    many = [item(n, f"Question {n}?", ["alpha", "beta", "d", "epsilon"], n % 4) for n in range(40)]
    first, again, other = (
        multiple_choice(model, tokenizer, many, chat=False, bootstrap_samples=200, seed=seed) for seed in (0, 0, 1)
    )
    assert first == again
    assert first.low <= first.accuracy <= first.high
    assert (first.low, first.high) != (other.low, other.high) or first.low == 0
    assert first.accuracy == other.accuracy


def test_every_figure_is_finite_plain_json(model, tokenizer):
    plain = multiple_choice(model, tokenizer, ITEMS, chat=True).to_dict()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert plain["per_kind"]["recall"]["n"] == 2
    assert "per_kind" not in plain["per_kind"]["recall"]


def test_the_shipped_items_are_scored_or_counted(model, tokenizer, request):
    """Four choices each; some of their questions exceed this small context."""
    items = read_choices(request.config.rootpath / "data" / "small" / "eval.jsonl")[:60]
    found = multiple_choice(model, tokenizer, items, chat=False, bootstrap_samples=20)
    assert found.n + found.too_long == 60
    assert 0 < found.too_long < 60
    assert found.chance == pytest.approx(0.25)
