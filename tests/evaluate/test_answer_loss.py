"""Loss on answers: only the tokens of what was said count, and they are the same with whatever prompt."""

import json

import pytest

from modicum.corpus import Conversation
from modicum.evaluate import answer_loss
from modicum.evaluate.answers import exchange_prompts, last_exchange
from modicum.store import UserError
from modicum.tokenizer import load_tokenizer


def conversation(*contents, origin="file:1"):
    roles = ["user", "assistant"] * len(contents)
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    return Conversation(messages, origin, None, None)


TALKS = [
    conversation("What is it?", "A cat."),
    conversation("And this one?", "Naïve café \U0001f600."),
    conversation("Hi", "Hello.", "Bye", "Good bye."),
    conversation("What is a buffer?", "A place in memory."),
]


def test_the_loss_is_that_of_a_float64_reference_over_what_the_last_answers_say(model, tokenizer, reference):
    nats, tokens = 0.0, 0
    for talk in TALKS:
        rendered = tokenizer.render(talk.messages)
        last = len(tokenizer.render(talk.messages[:-1]).ids)
        places = [i for i, mine in enumerate(rendered.assistant_mask) if mine and i >= last]
        assert rendered.ids[places.pop()] == tokenizer.end_of_turn_id
        assert tokenizer.decode([rendered.ids[i] for i in places]) == talk.messages[-1]["content"]
        logprobs = reference(rendered.ids)
        nats -= sum(logprobs[i - 1] for i in places)
        tokens += len(places)
    found = answer_loss(model, tokenizer, TALKS)
    assert found.nats_per_token == pytest.approx(nats / tokens, rel=1e-5)
    assert (found.tokens, found.conversations, found.too_long, found.shuffled) == (tokens, 4, 0, False)
    assert found.low <= found.nats_per_token <= found.high


def test_a_shuffled_prompt_changes_the_loss_and_not_the_tokens(model, tokenizer, reference):
    true, shuffled = (answer_loss(model, tokenizer, TALKS, shuffle=flag, seed=3) for flag in (False, True))
    assert shuffled.shuffled
    assert shuffled.tokens == true.tokens
    assert shuffled.nats_per_token != pytest.approx(true.nats_per_token, rel=1e-4)
    exchanges = [last_exchange(tokenizer, talk) for talk in TALKS]
    prompts = exchange_prompts([exchange.prompt for exchange in exchanges], 3)
    nats = 0.0
    for prompt, exchange in zip(prompts, exchanges, strict=True):
        nats -= sum(reference(prompt + exchange.answer)[len(prompt) - 1 : -1])
    assert shuffled.nats_per_token == pytest.approx(nats / true.tokens, rel=1e-5)


def test_one_conversation_has_a_loss_without_an_interval(model, tokenizer):
    found = answer_loss(model, tokenizer, TALKS[:1])
    assert (found.conversations, found.low, found.high) == (1, None, None)
    assert found.nats_per_token > 0


def test_an_answer_of_nothing_but_its_end_is_still_scored(model, tokenizer, tmp_path):
    """A message may have calls and no content, and this template writes no calls."""
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    tokenizer.save(tmp_path)
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}
    talk = Conversation([{"role": "user", "content": "Look."}, call], "file:1", None, None)
    assert answer_loss(model, load_tokenizer(tmp_path, template=template), [talk]).tokens == 1


def test_no_answer_keeps_its_own_prompt_or_an_equal_one():
    prompts = [[1], [2], [3], [1], [2], [1]]
    for seed in range(50):
        exchanged = exchange_prompts(prompts, seed)
        assert all(a != b for a, b in zip(prompts, exchanged, strict=True))
    assert exchange_prompts(prompts, 0) == exchange_prompts(prompts, 0)
    assert len({str(exchange_prompts(prompts, seed)) for seed in range(50)}) > 1


def test_different_prompts_are_each_used_exactly_once():
    prompts = [[n] for n in range(20)]
    assert sorted(exchange_prompts(prompts, 7)) == prompts


@pytest.mark.parametrize("prompts", [[[1]], [[1, 2], [1, 2]]])
def test_equal_prompts_cannot_be_exchanged(prompts):
    with pytest.raises(UserError, match="that are measured all have one prompt"):
        exchange_prompts(prompts, 0)


def test_conversations_longer_than_the_context_are_left_out_and_counted(model, tokenizer):
    long = conversation("long " * 100, "yes")
    found = answer_loss(model, tokenizer, [*TALKS, long])
    assert (found.conversations, found.too_long) == (4, 1)
    with pytest.raises(UserError, match="none of 1 held-out conversations fits"):
        answer_loss(model, tokenizer, [long])
    with pytest.raises(UserError, match="none of 0 held-out conversations fits"):
        answer_loss(model, tokenizer, [])


def test_a_number_of_tokens_bounds_what_is_scored_to_conversations_that_the_seed_draws(model, tokenizer):
    many = [conversation(f"{number}?", f"It is {number}.") for number in range(200)]
    exchange = last_exchange(tokenizer, many[0])
    size = len(exchange.prompt) + len(exchange.answer)
    bounded = [answer_loss(model, tokenizer, many, max_tokens=20 * size, seed=seed) for seed in (1, 1, 2)]
    assert 10 <= bounded[0].conversations <= 25
    assert bounded[0] == bounded[1] != bounded[2]
    true, shuffled = (answer_loss(model, tokenizer, many, max_tokens=200, shuffle=flag) for flag in (False, True))
    assert true.tokens == shuffled.tokens
    assert answer_loss(model, tokenizer, many, max_tokens=10**6) == answer_loss(model, tokenizer, many)


def test_a_shuffled_prompt_too_long_for_an_answer_loses_its_beginning(model, tokenizer):
    """Both fit alone; the long prompt before the long answer does not, and no answer's token may be lost for it."""
    talks = [conversation("where " * 10, "x"), conversation("y", "an answer " * 8)]
    true, shuffled = (answer_loss(model, tokenizer, talks, shuffle=flag) for flag in (False, True))
    exchanges = [last_exchange(tokenizer, talk) for talk in talks]
    assert len(exchanges[0].prompt) + len(exchanges[1].answer) > model.config.max_position_embeddings + 1
    assert shuffled.tokens == true.tokens


def test_a_conversation_without_an_answer_is_named(model, tokenizer):
    with pytest.raises(UserError, match="talks:7: no assistant message"):
        answer_loss(model, tokenizer, [conversation("hi", origin="talks:7")])


def test_every_figure_is_finite_plain_json(model, tokenizer):
    plain = answer_loss(model, tokenizer, TALKS, shuffle=True).to_dict()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
