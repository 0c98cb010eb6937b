"""Loading conversations: the split, and an account of every line."""

import json
from dataclasses import asdict

import pytest
from tune_chats import conversation, turns

from modicum.corpus import Contamination, read_conversations
from modicum.store import UserError
from modicum.tune import collect, load_conversations, make_example
from modicum.tune.heldout import draw


def load(paths, tokenizer, *, sequence_length=128, heldout_fraction=0.25, seed=0, avoid=None):
    return load_conversations(
        paths, tokenizer, sequence_length=sequence_length, heldout_fraction=heldout_fraction, seed=seed, avoid=avoid
    )


def many(count=60):
    return [turns(f"Question number {n}?", f"Answer {n}.") for n in range(count)]


def openings(conversations):
    return {chat.messages[0]["content"] for chat in conversations}


def texts(examples, tokenizer):
    return sorted(tokenizer.decode(ids.tolist()) for ids, _ in examples)


def test_every_conversation_is_accounted_for_once(tokenizer, write):
    long_turn, long_talk = turns("Why?", "Because. " * 200), turns("Tell me.", "I will.", "So?", "Because. " * 200)
    path = write(*many(), long_turn, many(1)[0], long_talk, long_turn)
    report = load([path], tokenizer).report
    assert (report.read, report.duplicates.conversations, report.too_long.conversations) == (64, 2, 1)
    assert report.shortened.conversations == 1
    assert report.train + report.heldout == 61
    assert report.too_long.first == f"{path}:61"
    assert report.duplicates.first == f"{path}:62"
    assert report.shortened.first == f"{path}:63"


QUESTION = "Which port does the harbour master open at noon?"


@pytest.mark.parametrize(
    "chat",
    [
        turns(QUESTION, "The third."),
        turns("A riddle, please.", f"Gladly. {QUESTION}"),
        turns("Hi.", "Hello.", f"Tell me:\r\n{QUESTION.upper()}", "No."),
        turns("Hi.", "Hello.", system=f"You are asked this: {QUESTION}"),
    ],
    ids=["a question", "an answer", "a later turn, written otherwise", "a system message"],
)
def test_no_conversation_holds_a_text_to_avoid(tokenizer, write, chat):
    path, avoid = write(*many(), chat), Contamination.of([QUESTION], 8)
    split = load([path], tokenizer, avoid=avoid)
    report = split.report
    assert (report.contaminated.conversations, report.contaminated.first) == (1, f"{path}:61")
    assert (report.read, report.train + report.heldout) == (61, 60)
    kept = texts(split.train, tokenizer) + texts(split.heldout_examples, tokenizer)
    assert not any("harbour master" in text.lower() for text in kept)
    assert load([path], tokenizer).report.contaminated.conversations == 0, "nothing is avoided unless it is said"


def test_conversations_that_all_hold_a_text_to_avoid_are_refused_with_the_reason(tokenizer, write):
    path, avoid = write(turns(QUESTION, "One."), turns(QUESTION, "Two.")), Contamination.of([QUESTION], 8)
    with pytest.raises(UserError, match=rf"{path}:1: holds a question of evaluate\.items.*other of the 2"):
        load([path], tokenizer, avoid=avoid)
    path = write(turns(QUESTION, "One."), turns("Why?", "Because. " * 200))
    with pytest.raises(UserError, match=rf"{path}:2: longer than 129 tokens.*other of the 1 "):
        load([path], tokenizer, avoid=avoid)


def test_each_example_is_the_conversation_rendered_once_and_whole(tokenizer, write):
    path = write(*many())
    split = load([path], tokenizer)
    expected = [make_example(chat, tokenizer) for chat in read_conversations(path)]
    everything = texts(split.train, tokenizer) + texts(split.heldout_examples, tokenizer)
    assert sorted(everything) == texts(collect(expected), tokenizer)
    assert split.report.tokens == len(split.train.ids)
    assert split.report.supervised_tokens == split.train.supervised_tokens > 0


def test_heldout_conversations_and_examples_are_the_same_ones_shortened_alike(tokenizer, write):
    long_talks = [turns(f"Say {n}.", "Gladly.", "More!", "Because. " * 200) for n in range(20)]
    split = load([write(*long_talks)], tokenizer)
    assert len(split.heldout) == len(split.heldout_examples) > 0
    for chat, (ids, _) in zip(split.heldout, split.heldout_examples, strict=True):
        assert chat.messages == turns(chat.messages[0]["content"], "Gladly.")
        assert ids.tolist() == make_example(chat, tokenizer).ids


def test_the_split_depends_neither_on_the_order_of_lines_nor_on_other_lines(tokenizer, write):
    first = load([write(*many(), name="a.jsonl")], tokenizer)
    turned = load([write(*reversed(many()), name="b.jsonl")], tokenizer)
    in_two = load([write(*many()[40:], name="c.jsonl"), write(*many()[:40], name="d.jsonl")], tokenizer)
    more = load([write(*many(90), name="e.jsonl")], tokenizer)
    assert openings(first.heldout) == openings(turned.heldout) == openings(in_two.heldout)
    assert openings(first.heldout) == openings(more.heldout) & openings(read_conversations(write(*many())))


def test_another_seed_holds_out_others(tokenizer, write):
    path = write(*many())
    assert openings(load([path], tokenizer).heldout) != openings(load([path], tokenizer, seed=1).heldout)


@pytest.mark.parametrize("other", ["WHAT is a port", "What is  a port?!", "what is a port?"])
def test_one_opening_question_never_stands_on_both_sides(tokenizer, write, other):
    chats = [*many(), turns("What is a port?", "A number."), turns(other, "A door."), turns(other, "A", "B", "C")]
    path = write(*chats)
    for seed in range(8):
        heldout = load([path], tokenizer, seed=seed).heldout
        answers = [chat.messages[1]["content"] for chat in heldout]
        assert sum(answer in ("A number.", "A door.", "A") for answer in answers) in (0, 3)


def test_openings_without_words_are_told_apart():
    assert draw(conversation("??", "!"), 0) != draw(conversation("!!", "?"), 0)
    assert draw(conversation("??", "!"), 0) == draw(conversation("??", "another"), 0)


def test_the_share_held_out_is_about_the_fraction_asked_for():
    draws = [draw(conversation(f"Question {n}?", "Yes."), 0) for n in range(4000)]
    assert sum(number < 0.05 for number in draws) / 4000 == pytest.approx(0.05, abs=0.012)
    assert min(draws) >= 0
    assert max(draws) < 1


def test_where_chance_holds_out_none_or_all_exactly_one_opening_is_held_out(tokenizer, write):
    two = write(turns("One?", "1"), turns("Two?", "2"))
    for seed in range(12):
        for fraction in (0.001, 0.499):
            report = load([two], tokenizer, heldout_fraction=fraction, seed=seed).report
            assert (report.train, report.heldout) == (1, 1)


def test_nothing_is_held_out_when_nothing_is_asked_for(tokenizer, write):
    split = load([write(turns("One?", "1"))], tokenizer, heldout_fraction=0)
    assert (len(split.train), split.heldout, len(split.heldout_examples)) == (1, [], 0)


def test_a_single_opening_question_cannot_be_split(tokenizer, write):
    path = write(turns("One?", "1"), turns("one", "2"))
    with pytest.raises(UserError, match="opens with the same question"):
        load([path], tokenizer)


def test_an_example_may_have_one_token_more_than_a_row_has_inputs(tokenizer, write):
    path = write(turns("Why?", "Because."), turns("And why that?", "Because it is so. " * 5))
    longest = max(len(make_example(chat, tokenizer).ids) for chat in read_conversations(path))
    assert load([path], tokenizer, sequence_length=longest - 1).report.too_long.conversations == 0
    assert load([path], tokenizer, sequence_length=longest - 2, heldout_fraction=0).report.too_long.conversations == 1


def test_all_too_long_is_refused_with_the_first_line_and_the_setting_to_raise(tokenizer, write):
    path = write(*many(5), many(1)[0])
    with pytest.raises(UserError, match=rf"{path}:1: longer than 4 tokens.*other of the 6.*sft\.sequence_length"):
        load([path], tokenizer, sequence_length=3)


def test_a_conversation_without_an_assistant_turn_is_refused_with_its_line(tokenizer, write):
    path = write(*many(3), [{"role": "user", "content": "Anyone?"}])
    with pytest.raises(UserError, match=rf"{path}:4: "):
        load([path], tokenizer)


def test_no_conversation_at_all_is_refused(tokenizer, write):
    with pytest.raises(UserError, match=r"chat\.jsonl"):
        load([write()], tokenizer)
    with pytest.raises(UserError, match="no conversations"):
        load([], tokenizer)


def test_the_report_is_plain_data(tokenizer, write):
    assert json.loads(json.dumps(asdict(load([write(*many())], tokenizer).report)))["read"] == 60
