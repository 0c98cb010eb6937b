"""From a conversation to an example: what is supervised, what never is, and where a long one ends."""

from dataclasses import replace
from itertools import groupby

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tune_chats import conversation, turns

from modicum.corpus import Conversation
from modicum.store import UserError
from modicum.tokenizer import load_tokenizer
from modicum.tune import Examples, collect, make_example, shorten

words = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30)
literals = st.sampled_from(
    ["<|im_end|>", "<|im_start|>assistant\n", "<|endoftext|>", "<|pad|>", "<tool_call>", "<|im_"]
)
content = st.lists(st.one_of(words, literals), min_size=1, max_size=4).map("".join).filter(str.strip)
chats = st.lists(content, min_size=2, max_size=6).map(lambda contents: contents[: len(contents) // 2 * 2])
with_tokenizer = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)


def supervised_texts(example, tokenizer):
    """What the loss counts, a string for each run of neighbouring targets."""
    tokens = zip(example.ids, example.supervised, strict=True)
    runs = [[token for token, _ in run] for wanted, run in groupby(tokens, key=lambda t: t[1]) if wanted]
    return [tokenizer.decode(run) for run in runs]


@with_tokenizer
@given(chats)
def test_exactly_the_answers_and_the_tokens_that_end_them_are_supervised(tokenizer, contents):
    example = make_example(conversation(*contents), tokenizer)
    assert supervised_texts(example, tokenizer) == [answer.strip() + "<|im_end|>" for answer in contents[1::2]]


@with_tokenizer
@given(chats)
def test_every_answer_ends_with_a_supervised_end_of_turn_that_is_neither_padding_nor_end_of_text(tokenizer, contents):
    example = make_example(conversation(*contents), tokenizer)
    ends = [place for place, token in enumerate(example.ids) if token == tokenizer.end_of_turn_id]
    assert [example.supervised[place] for place in ends] == [False, True] * (len(contents) // 2)
    assert len({tokenizer.end_of_turn_id, tokenizer.pad_id, tokenizer.eot_id}) == 3


@with_tokenizer
@given(chats, st.one_of(st.none(), content))
def test_the_prompt_that_is_served_is_an_exact_prefix_of_the_example_trained_on(tokenizer, contents, system):
    messages = turns(*contents, system=system)
    example = make_example(conversation(*contents, system=system), tokenizer)
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = tokenizer.render(messages[:place], add_generation_prompt=True).ids
            assert example.ids[: len(prompt)] == prompt
            assert example.supervised[len(prompt)]
            assert not example.supervised[len(prompt) - 1]


@with_tokenizer
@given(chats)
def test_text_of_a_user_that_spells_control_tokens_stays_text(tokenizer, contents):
    example = make_example(conversation(*contents), tokenizer)
    control = [token for token in example.ids if token in tokenizer.special_ids]
    assert control == [tokenizer.encode_with_control("<|im_start|>")[0], tokenizer.end_of_turn_id] * len(contents)


def test_an_example_begins_with_one_start_of_turn_and_no_second_beginning_of_text(tokenizer):
    ids = make_example(conversation("Hello!", "Hi."), tokenizer).ids
    assert ids[0] == tokenizer.encode_with_control("<|im_start|>")[0]
    assert ids.count(tokenizer.eot_id) == 0
    assert ids == tokenizer.render(turns("Hello!", "Hi.")).ids


def with_template(tokenizer, directory, template):
    tokenizer.save(directory)
    (directory / "own.jinja").write_text(template, "utf-8")
    return load_tokenizer(directory, template=(directory / "own.jinja").read_text("utf-8"))


ANSWER = "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"


def test_the_end_of_the_last_turn_is_supervised_where_a_template_of_ones_own_ends_with_it(tokenizer, tmp_path):
    own = with_template(
        tokenizer,
        tmp_path,
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' %}" + ANSWER + "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    )
    example = make_example(conversation("Hello!", "Hi there."), own)
    assert supervised_texts(example, own) == ["Hi there.<|im_end|>"]


def test_the_first_token_is_no_target_even_where_a_template_starts_with_the_answer(tokenizer, tmp_path):
    bare = "{% for m in messages %}{% if m.role == 'assistant' %}" + ANSWER + "{% endif %}{% endfor %}"
    example = make_example(conversation("Hello!", "Hi there."), with_template(tokenizer, tmp_path, bare))
    assert example.supervised == [False] + [True] * (len(example.ids) - 1)


def test_nothing_supervised_is_refused_with_file_and_line(tokenizer):
    silent = Conversation([{"role": "user", "content": "Anyone?"}], "talk.jsonl:7", None, None)
    with pytest.raises(UserError, match=r"talk\.jsonl:7: nothing to learn from"):
        make_example(silent, tokenizer)


def test_what_the_renderer_refuses_is_reported_with_file_and_line(tokenizer):
    broken = replace(conversation("Hello \ud800", "Hi."), origin="talk.jsonl:3")
    with pytest.raises(UserError, match=r"talk\.jsonl:3: message 1.*lone surrogate"):
        make_example(broken, tokenizer)


@pytest.mark.parametrize("system", [None, "You are brief."])
def test_a_long_conversation_ends_with_the_last_assistant_turn_that_fits(tokenizer, system):
    contents = [f"Question {n}, a little longer than before? " * (n % 3 + 1) for n in range(12)]
    whole = make_example(conversation(*contents, system=system), tokenizer)
    beginnings = [make_example(conversation(*contents[:n], system=system), tokenizer) for n in range(2, 13, 2)]
    lengths = [len(beginning.ids) for beginning in beginnings]
    for longest in sorted({lengths[0], *(length + more for length in lengths[1:] for more in (-1, 0, 1))}):
        cut = shorten(whole, tokenizer, longest=longest)
        expected = [beginning for beginning in beginnings if len(beginning.ids) <= longest][-1]
        assert cut is not None
        assert (cut.ids, cut.supervised) == (expected.ids, expected.supervised)
        assert cut.conversation.messages == expected.conversation.messages


def test_a_conversation_whose_first_answer_does_not_fit_is_given_up(tokenizer):
    whole = make_example(conversation("Why?", "Because. " * 50, "And?", "Yes."), tokenizer)
    first_turn = make_example(conversation("Why?", "Because. " * 50), tokenizer)
    assert shorten(whole, tokenizer, longest=len(first_turn.ids) - 1) is None
    assert shorten(whole, tokenizer, longest=len(first_turn.ids)) is not None


def test_a_question_left_without_an_answer_is_cut_off_when_room_is_short(tokenizer):
    whole = make_example(conversation("Why?", "So.", "And then? " * 20), tokenizer)
    kept = shorten(whole, tokenizer, longest=len(whole.ids) - 1)
    assert kept is not None
    assert kept.conversation.messages == turns("Why?", "So.")


def test_tools_are_rendered_into_the_example(tokenizer):
    tool = {"name": "look_up", "parameters": {}}
    example = make_example(Conversation(turns("Hi", "Hello"), "x:1", None, [tool]), tokenizer)
    assert "look_up" in tokenizer.decode(example.ids)


def test_examples_keep_every_token_and_can_be_told_apart_by_their_hash(tokenizer):
    made = [make_example(conversation("Hello!", answer), tokenizer) for answer in ("Hi.", "Good day to you.", "Yes?")]
    examples = collect(made)
    assert [(ids.tolist(), flags.tolist()) for ids, flags in examples] == [(e.ids, e.supervised) for e in made]
    assert examples.lengths.tolist() == [len(e.ids) for e in made]
    assert examples.supervised_tokens == sum(e.supervised_tokens for e in made)
    odd = examples.select(np.array([True, False, True]))
    assert [ids.tolist() for ids, _ in odd] == [made[0].ids, made[2].ids]
    assert odd.hash == collect([made[0], made[2]]).hash != examples.hash
    flags = examples.supervised.copy()
    flags[-1] = ~flags[-1]
    assert Examples(examples.ids, flags, examples.starts).hash != examples.hash
    with pytest.raises(IndexError):
        examples[3]
