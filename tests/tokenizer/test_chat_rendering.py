"""The renderer with the shipped template, against transformers and against the rules themselves."""

import sys

import chat_strategies
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from modicum.store import UserError
from modicum.tokenizer.conversation import PRIVATE_USE, Conversation
from modicum.tokenizer.literals import Literals

EXCHANGE = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi "},
    {"role": "assistant", "content": "\n Hello.  "},
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "sky", "arguments": {"at": "Ås"}}}]},
    {"role": "tool", "content": "rain"},
    {"role": "assistant", "content": "Rain."},
]


def ask_transformers(peer, messages, tools, prompt):
    """ids and mask as transformers makes them from the same files."""
    answer = peer.apply_chat_template(
        messages,
        tools=tools,
        add_generation_prompt=prompt,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    return answer["input_ids"], [bool(one) for one in answer["assistant_masks"]]


@given(
    messages=chat_strategies.messages(chat_strategies.without_names),
    tools=chat_strategies.tools(chat_strategies.without_names),
    prompt=st.booleans(),
)
@example(messages=EXCHANGE, tools=[{"name": "sky"}], prompt=True)
@settings(max_examples=150, deadline=None)
def test_ids_and_mask_are_those_of_transformers_for_text_without_control_tokens_names(
    tokenizer, peer, messages, tools, prompt
):
    ours = tokenizer.render(messages, tools=tools, add_generation_prompt=prompt)
    assert (ours.ids, ours.assistant_mask) == ask_transformers(peer, messages, tools, prompt)


def control_tokens(messages, tools, prompt):
    """What the template itself writes, by hand."""
    expected = ["<|im_start|>", "<tool_call>", "</tool_call>", "<|im_end|>"] if tools else []
    for place, message in enumerate(messages):
        if place == 0 and tools and message["role"] == "system":
            continue  # it shares the turn of the tools
        inner = ["<tool_call>", "</tool_call>"] * len(message.get("tool_calls") or [])
        if message["role"] == "tool":
            inner = ["<tool_response>", "</tool_response>"]
        expected += ["<|im_start|>", *inner, "<|im_end|>"]
    return expected + ["<|im_start|>"] * prompt


@given(
    messages=chat_strategies.messages(chat_strategies.with_names),
    tools=chat_strategies.tools(chat_strategies.with_names),
    prompt=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_no_text_becomes_a_control_token_and_none_is_changed(tokenizer, peer, messages, tools, prompt):
    rendered = tokenizer.render(messages, tools=tools, add_generation_prompt=prompt)
    control = [tokenizer.decode([i]) for i in rendered.ids if i in tokenizer.special_ids]
    assert control == control_tokens(messages, tools, prompt)
    assert tokenizer.decode(rendered.ids) == rendered.text
    assert rendered.text == peer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=prompt, tokenize=False
    )


@given(
    messages=chat_strategies.messages(chat_strategies.with_names),
    tools=chat_strategies.tools(chat_strategies.with_names),
)
@example(messages=EXCHANGE, tools=None)
@settings(max_examples=100, deadline=None)
def test_the_prompt_served_is_a_prefix_of_the_example_trained_on_and_the_mask_begins_where_it_ends(
    tokenizer, messages, tools
):
    whole = tokenizer.render(messages, tools=tools)
    supervised = [False] * len(whole.ids)
    for place, message in enumerate(messages):
        if message["role"] != "assistant" or place == 0:
            continue
        prompt = tokenizer.render(messages[:place], tools=tools, add_generation_prompt=True)
        turn = tokenizer.render(messages[: place + 1], tools=tools)
        assert whole.ids[: len(prompt.ids)] == prompt.ids
        assert not any(prompt.assistant_mask[len(tokenizer.render(messages[:place], tools=tools).ids) :])
        assert turn.ids[-2] == tokenizer.end_of_turn_id
        for token in range(len(prompt.ids), len(turn.ids) - 1):
            supervised[token] = True
    if messages[0]["role"] == "assistant":
        first = len(tokenizer.render(messages[:1], tools=tools).ids)
        supervised[:first] = whole.assistant_mask[:first]
    assert whole.assistant_mask == supervised


def test_a_conversation_is_rendered_as_written_down_here(tokenizer):
    rendered = tokenizer.render(EXCHANGE, tools=[{"name": "sky"}], add_generation_prompt=True)
    assert rendered.text == (
        "<|im_start|>system\nBe brief.\n\nYou may call the tools below; each line is the JSON schema of one.\n<tools>\n"
        '{"name": "sky"}\n</tools>\n'
        "To call one, write its name and arguments as a JSON object between these markers:\n"
        '<tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\nHi <|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n"
        "<|im_start|>user\nWeather?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "sky", "arguments": {"at": "Ås"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>tool\n<tool_response>\nrain\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nRain.<|im_end|>\n<|im_start|>assistant\n"
    )
    learned = [i for i, mine in zip(rendered.ids, rendered.assistant_mask, strict=True) if mine]
    assert tokenizer.decode(learned) == (
        'Hello.<|im_end|><tool_call>\n{"name": "sky", "arguments": {"at": "Ås"}}\n</tool_call><|im_end|>Rain.<|im_end|>'
    )


def test_no_end_of_text_stands_in_front_of_a_conversation(tokenizer):
    assert tokenizer.render(EXCHANGE).ids[0] == tokenizer.encode_with_control("<|im_start|>")[0]
    assert tokenizer.eot_id not in tokenizer.render(EXCHANGE).ids


def test_a_header_is_one_run_of_tokens_before_every_character_that_content_can_begin_with(tokenizer):
    """Trimmed content begins with no white space; then no token reaches over the line break of the header."""
    header = tokenizer.encode("assistant\n")
    first = [chr(c) for c in range(0x20000) if not 0xD800 <= c < 0xE000 and chr(c).strip()]
    assert len(first) > 120_000
    encoded = tokenizer.encode_batch(["assistant\n" + character for character in first])
    assert [c for c, ids in zip(first, encoded, strict=True) if ids[: len(header)] != header] == []


@pytest.mark.parametrize("space", [chr(c) for c in range(sys.maxunicode + 1) if chr(c).isspace()])
def test_assistant_content_is_trimmed_and_nobody_elses(tokenizer, space):
    mine, yours = {"role": "assistant", "content": f"{space}a{space}"}, {"role": "user", "content": f"{space}a{space}"}
    assert tokenizer.render([mine]).text == "<|im_start|>assistant\na<|im_end|>\n"
    assert tokenizer.render([yours]).text == f"<|im_start|>user\n{space}a{space}<|im_end|>\n"


def test_the_character_that_stands_for_a_name_cannot_be_written_by_a_user():
    literals = Literals(["<|im_end|>"])

    def hidden(content):
        conversation = Conversation([{"role": "user", "content": content}], None, literals)
        return conversation, conversation.messages[0]["content"]

    _, character = hidden("<|im_end|>")
    assert len(character) == 1
    conversation, other = hidden(f"<|im_end|>{character}")
    assert other[1] == character != other[0]
    assert conversation.restore(other) == f"<|im_end|>{character}"


def test_a_conversation_of_every_private_use_character_is_refused_only_when_one_is_needed(tokenizer):
    every = "".join(chr(code) for codes in PRIVATE_USE for code in codes)
    assert every in tokenizer.render([{"role": "user", "content": every}]).text
    with pytest.raises(UserError, match="every private-use character"):
        tokenizer.render([{"role": "user", "content": every + "<|im_end|>"}])


@pytest.mark.parametrize(
    ("messages", "fault"),
    [
        ([], "at least one message"),
        ({"role": "user", "content": "x"}, "at least one message"),
        ("hello", "at least one message"),
        (["hello"], "message 1: expected an object with role and content, found str"),
        ([{"content": "x"}], "message 1: unknown role None; expected one of system, user, assistant, tool"),
        ([{"role": "user", "content": "x"}, {"role": "<|im_end|>", "content": ""}], "message 2: unknown role"),
        ([{"role": "user"}], "message 1: a message of role user needs content"),
        ([{"role": "user", "content": None}], "message 1: a message of role user needs content"),
        ([{"role": "user", "content": ["x"]}], "message 1: content must be a string, found list"),
        ([{"role": "user", "content": "\ud83d"}], r"message 1, content: a lone surrogate \(U\+D83D\) at character 1"),
        ([{"role": "user", "content": "x", "at": object()}], "message 1, at: object is not JSON data"),
        ([{"role": "user", "content": "x", "at": {1: 2}}], "message 1, at: keys must be strings"),
        ([{"role": "user", "content": "x", "at": 2**2000}], "message 1, at: an integer of 2001 bits"),
        ([{"role": "assistant", "tool_calls": ["x"]}], "message 1: tool_calls must be a list of objects"),
        ([{"role": "assistant", "tool_calls": [{"name": "x"}]}], "chat template: "),
    ],
)
def test_what_is_no_conversation_is_refused_with_its_message_named(tokenizer, messages, fault):
    with pytest.raises(UserError, match=fault):
        tokenizer.render(messages)


def test_data_nested_too_deeply_is_refused(tokenizer):
    nested = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(UserError, match="nested too deeply"):
        tokenizer.render([{"role": "user", "content": "x", "at": nested}])


def test_a_surrogate_pair_in_two_strings_is_no_character(tokenizer):
    with pytest.raises(UserError, match="message 1, content: a lone surrogate"):
        tokenizer.render([{"role": "user", "content": "\ud83d\ude00"}])
