import gzip
import json

import pytest
import zstandard

from modicum.corpus import read_conversations
from modicum.store import UserError

USER = {"role": "user", "content": "Hello?"}
ASSISTANT = {"role": "assistant", "content": "Yes."}
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "now", "arguments": {}}}]}
RESULT = {"role": "tool", "content": ""}


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstandard.compress])
def test_a_conversation_keeps_its_turns_and_says_where_it_stands(tmp_path, pack):
    path = tmp_path / {bytes: "a.jsonl", gzip.compress: "a.jsonl.gz"}.get(pack, "a.jsonl.zst")
    line = json.dumps({"messages": [SYSTEM, USER, {**ASSISTANT, "mood": "good"}], "source": "s", "other": 1})
    path.write_bytes(pack(("\n" + line + "\n").encode()))
    (conversation,) = read_conversations(path)
    assert conversation.messages == [SYSTEM, USER, ASSISTANT]
    assert conversation.origin == f"{path}:2"
    assert (conversation.source, conversation.tools) == ("s", None)


@pytest.mark.parametrize(
    "messages",
    [
        [USER, ASSISTANT],
        [SYSTEM, USER, ASSISTANT, USER],
        [USER, CALL, RESULT, RESULT, ASSISTANT, USER, ASSISTANT],
        [USER, CALL, RESULT],
    ],
)
def test_turns_in_a_sensible_order_are_read(write_lines, messages):
    (conversation,) = read_conversations(write_lines("a.jsonl", [{"messages": messages}]))
    assert [turn["role"] for turn in conversation.messages] == [turn["role"] for turn in messages]


def test_tool_calls_and_tools_are_kept(write_lines):
    tools = [{"type": "function", "function": {"name": "now"}}]
    (conversation,) = read_conversations(write_lines("a.jsonl", [{"messages": [USER, CALL, RESULT], "tools": tools}]))
    assert conversation.messages[1] == {"role": "assistant", "content": "", "tool_calls": CALL["tool_calls"]}
    assert conversation.tools == tools


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "x"}, r'expected "messages".*the line has text'),
        ({"messages": []}, r'expected "messages"'),
        ({"messages": "x"}, r'expected "messages"'),
        ({"messages": ["x"]}, r"message 1: expected an object .*found a string"),
        ({"messages": [{"role": "human", "content": "x"}]}, r"message 1: role is 'human'; expected system, user"),
        ({"messages": [{"content": "x"}]}, r"message 1: role is None"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, r"message 1: role is \['user'\]"),
        ({"messages": [USER, {"role": "assistant"}]}, r"message 2: content must be a string, found null"),
        ({"messages": [{"role": "user", "content": 3}]}, r"message 1: content must be a string, found a number"),
        ({"messages": [USER, {"role": "assistant", "content": " \n"}]}, r"message 2: the content .* is blank"),
        ({"messages": [USER, USER]}, r"message 2: user after user; expected assistant"),
        ({"messages": [ASSISTANT, USER]}, r"message 1: assistant at the start; expected system or user"),
        ({"messages": [USER, SYSTEM, ASSISTANT]}, r"message 2: system after user; expected assistant"),
        ({"messages": [USER, RESULT, ASSISTANT]}, r"message 2: tool after user"),
        ({"messages": [USER, ASSISTANT, ASSISTANT]}, r"message 3: assistant after assistant; expected user or tool"),
        ({"messages": [SYSTEM, USER]}, r"no assistant message"),
        ({"messages": [{**USER, "tool_calls": [{}]}, ASSISTANT]}, r"message 1: tool_calls must be"),
        ({"messages": [USER, {**CALL, "tool_calls": "now"}]}, r"message 2: tool_calls must be"),
        ({"messages": [USER, ASSISTANT], "source": 1}, r"source must be a string, found a number"),
        ({"messages": [USER, ASSISTANT], "tools": {}}, r"tools must be a list"),
    ],
)
def test_a_faulty_conversation_is_named_with_file_and_line(write_lines, record, message):
    path = write_lines("a.jsonl", [{"messages": [USER, ASSISTANT]}, record])
    with pytest.raises(UserError, match=rf"a\.jsonl:2: .*{message}|a\.jsonl:2: {message}"):
        list(read_conversations(path))
