"""Mask boundaries: right on the shipped conversations, and each wrong mask is caught."""

from pathlib import Path

import pytest

from modicum.corpus import Conversation
from modicum.doctor.chat import mask_boundaries, mask_fault, prompt_fault
from modicum.tokenizer import Rendered, train_tokenizer
from modicum.tune import explain_mask

INSTRUCT = Path(__file__).parents[2] / "data" / "small" / "instruct.jsonl.gz"
TALK = [
    {"role": "system", "content": "You are terse."},
    {"role": "user", "content": "What is a port?"},
    {"role": "assistant", "content": " A number. "},
    {"role": "user", "content": "And a socket?"},
    {"role": "assistant", "content": "An address and a port."},
]


@pytest.fixture(scope="module")
def tokenizer():
    texts = [f"{message['role']} {message['content']}" for message in TALK] * 20
    trained, _ = train_tokenizer(texts, vocab_size=384, min_frequency=2, sample_bytes=10**6, seed=0)
    return trained


@pytest.fixture
def talk():
    return Conversation([dict(message) for message in TALK], "talk.jsonl:1", None, None)


def test_the_shipped_conversations_are_masked_at_their_answers(tokenizer):
    finding, shown = mask_boundaries([INSTRUCT], tokenizer)
    assert finding.outcome == "ok"
    assert finding.detail.startswith("500 conversations")
    assert len(shown) == 3
    first = shown[0].pieces
    assert [counts for _, counts in first] == [False, True, False]
    assert first[1][0] == 'T1070.003 is the technique "Clear Command History".<|im_end|>'


def test_an_answer_with_white_space_around_it_is_trimmed_and_right(tokenizer, talk):
    assert mask_fault(talk, explain_mask(talk, tokenizer), tokenizer) is None
    assert prompt_fault(talk, tokenizer) is None


def test_a_tool_call_belongs_to_the_answer(tokenizer):
    call = {"function": {"name": "scan", "arguments": {"port": 22}}}
    messages = [
        {"role": "user", "content": "Scan port 22."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "open"},
        {"role": "assistant", "content": "It is open."},
    ]
    conversation = Conversation(messages, "t:1", None, [{"name": "scan"}])
    pieces = explain_mask(conversation, tokenizer)
    assert any('"port": 22' in text for text, counts in pieces if counts)
    assert mask_fault(conversation, pieces, tokenizer) is None


def moved(pieces, change):
    """The pieces with `change(text, counts)` for each."""
    return [change(text, counts) for text, counts in pieces]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text, _: (text, False), "supervised pieces"),
        (lambda text, counts: (text.removesuffix("<|im_end|>"), counts), "never stop"),
        (lambda text, counts: (f"assistant\n{text}", counts), "more than the answer"),
        (lambda text, counts: (text[3:], counts), "does not hold the answer"),
    ],
)
def test_a_wrong_mask_is_named(tokenizer, talk, change, words):
    pieces = moved(explain_mask(talk, tokenizer), change)
    assert words in mask_fault(talk, pieces, tokenizer)


def test_a_supervised_question_is_named(tokenizer, talk):
    pieces = [("".join(text for text, _ in explain_mask(talk, tokenizer)), True)]
    assert mask_fault(talk, pieces, tokenizer) == "2 assistant turns, but 1 supervised pieces"


def test_a_prompt_without_its_header_is_named(tokenizer, talk, monkeypatch):
    honest = tokenizer.render

    def headless(messages, *, add_generation_prompt=False, tools=None):
        whole = honest(messages, add_generation_prompt=add_generation_prompt, tools=tools)
        return Rendered(whole.ids[1:], whole.assistant_mask[1:], whole.text) if add_generation_prompt else whole

    monkeypatch.setattr(tokenizer, "render", headless)
    assert "not what the example begins with" in prompt_fault(talk, tokenizer)


def test_a_broken_line_of_the_users_is_the_users_to_mend(tokenizer, tmp_path):
    path = tmp_path / "chat.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "Hello?"}]}\n')
    finding, shown = mask_boundaries([path], tokenizer)
    assert (finding.outcome, finding.yours, shown) == ("failed", True, [])
    assert f"{path}:1" in finding.detail
