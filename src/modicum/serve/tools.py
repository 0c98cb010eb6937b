"""Tool calls: a grammar that holds a model to its tools' schemas, and a reader that takes the calls out of its answer.

A call stands between two control tokens, `<tool_call>` and `</tool_call>`, as one JSON object. The grammar keeps their
names out of plain text, so that what looks like a call is one, with arguments that its schema allows.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from modicum.serve.errors import bad_request
from modicum.serve.limits import Limits
from modicum.serve.requests import ChatRequest, NamedTool, Tool
from modicum.serve.schemas import check_schema, spaced
from modicum.store import UserError
from modicum.tokenizer import Tokenizer

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_END = "}\n" + CLOSE
_PROBE = {"x": 1}
_HEAD = re.compile(r'\n\{"name": "([a-zA-Z0-9_-]{1,64})", "arguments": ')


def writes_tools(tokenizer: Tokenizer) -> bool:
    """Whether the template shows tools to the model, and writes a call as it is read here."""
    text = _call_written(tokenizer, _PROBE if wants_objects(tokenizer) else json.dumps(_PROBE)) or ""
    return "shown?" in text and f'{OPEN}\n{{"name": "probe", "arguments": {json.dumps(_PROBE)}{_END}' in text


@lru_cache(maxsize=4)
def wants_objects(tokenizer: Tokenizer) -> bool:
    """Whether the template takes a call's arguments as an object. Clients send them as JSON in a string, and there are
    templates that would write that as JSON once more, or cannot read it."""
    as_text = _call_written(tokenizer, json.dumps(_PROBE)) or ""
    return json.dumps(_PROBE) not in as_text and _call_written(tokenizer, _PROBE) is not None


def _call_written(tokenizer: Tokenizer, arguments: Any) -> str | None:
    """A conversation with one tool and one call of it; None where the template refuses them."""
    tool = {"type": "function", "function": {"name": "probe", "description": "shown?", "parameters": {}}}
    # nine characters, since Mistral's templates take no other id
    call = {"type": "function", "id": "probe0000", "function": {"name": "probe", "arguments": arguments}}
    answer: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        return tokenizer.render([{"role": "user", "content": "a"}, answer], tools=[tool], masked=False).text
    except UserError:  # it has no words for them: requests with tools are refused, others are served
        return None


def offered(request: ChatRequest, limits: Limits) -> list[Tool]:
    """The tools that the model may call. Raises ApiError 400 for too many, double names, and a choice of none of
    them."""
    tools = request.tools or []
    if len(tools) > limits.tools:
        raise bad_request(f"tools: at most {limits.tools}, found {len(tools)}", "tools")
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise bad_request("tools: two functions have the same name", "tools")
    choice = request.tool_choice
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise bad_request("tool_choice: names a function that is not in tools", "tool_choice")
    if choice == "required" and not tools:
        raise bad_request("tool_choice: required, but there are no tools", "tool_choice")
    return [] if choice == "none" else tools


def call_grammar(request: ChatRequest, tools: Sequence[Tool], schema: Any, limits: Limits) -> str:
    """The Lark grammar of an answer that may, or must, call `tools`. schema: what a text answer must follow, or
    None."""
    choice = request.tool_choice
    if isinstance(choice, NamedTool):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
    one = isinstance(choice, NamedTool) or request.parallel_tool_calls is False
    rules = ["calls: call" if one else 'calls: call ("\\n" call)*']
    if choice == "required" or isinstance(choice, NamedTool):
        rules.append("start: calls")
    elif schema is None:
        rules += ["start: TEXT? calls?", f"TEXT: /[\\s\\S]+/ & ~/[\\s\\S]*{OPEN}[\\s\\S]*/"]
    else:
        check_schema(schema, limits, "response_format")
        rules += ["start: body | calls", f"body: %json {spaced(schema)}"]
    bodies = []
    for number, tool in enumerate(tools):
        head = json.dumps(f'{json.dumps(tool.function.name)}, "arguments": ')
        bodies.append(f"{head} args_{number}")
        rules.append(f"args_{number}: %json {spaced(_arguments(tool, number, limits))}")
    rules.append(f'call: {OPEN} "\\n{{\\"name\\": " ({" | ".join(bodies)}) "}}\\n" {CLOSE}')
    return "\n".join(rules)


def _arguments(tool: Tool, number: int, limits: Limits) -> dict[str, Any]:
    param = f"tools.{number}.function.parameters"
    schema = tool.function.parameters
    if not schema:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    check_schema(schema, limits, param)
    if schema.get("type", "object") != "object":
        raise bad_request(f"{param}: arguments are an object, so its type must be object", param)
    return {**schema, "type": "object"}


@dataclass(frozen=True)
class Text:
    """A piece of what is said beside the calls."""

    text: str


@dataclass(frozen=True)
class Call:
    """The next call begins."""

    name: str


@dataclass(frozen=True)
class Arguments:
    """A piece of the newest call's arguments, as JSON."""

    text: str


@dataclass(frozen=True)
class Done:
    """The newest call is whole."""


Event = Text | Call | Arguments | Done


class CallReader:
    """Takes an answer apart as it comes; what could still become a marker is held back until it cannot.

    json_or_calls: the answer is either one JSON value, whose strings may hold a marker's letters, or calls alone. Its
    first character tells which, since no JSON begins as a marker does.
    """

    def __init__(self, *, json_or_calls: bool = False) -> None:
        self._held = ""
        self._inside = self._named = False
        self._undecided, self._is_json = json_or_calls, False

    def feed(self, text: str) -> Iterator[Event]:
        """The events that are certain now."""
        self._held += text
        while (event := self._next()) is not None:
            if not isinstance(event, Text | Arguments) or event.text:
                yield event

    def finish(self) -> Iterator[Event]:
        """What was held back, once the answer has ended."""
        held, self._held = self._held, ""
        if held and not self._inside:
            yield Text(held)
        elif held and self._named:
            yield Arguments(held)

    def _next(self) -> Event | None:
        if self._undecided and (begun := self._held.lstrip()):
            self._undecided, self._is_json = False, begun[0] != OPEN[0]
        if self._undecided:
            return None
        if self._is_json:
            text, self._held = self._held, ""
            return Text(text) if text else None
        if not self._inside:
            before, found, after = self._held.partition(OPEN)
            if found:
                self._held, self._inside, self._named = after, True, False
                return Text(before.removesuffix("\n"))
            return self._certain(Text, "\n" + OPEN, OPEN)
        if not self._named:
            if (head := _HEAD.match(self._held)) is None:
                return None
            self._held, self._named = self._held[head.end() :], True
            return Call(head[1])
        before, found, after = self._held.partition(_END)
        if found and before:
            self._held = found + after
            return Arguments(before)
        if found:
            self._held, self._inside = after, False
            return Done()
        return self._certain(Arguments, _END)

    def _certain(self, kind: type[Text] | type[Arguments], *markers: str) -> Event | None:
        """The text before what may be the beginning of a marker."""
        held = max(_overlap(self._held, marker) for marker in markers)
        cut = len(self._held) - held
        text, self._held = self._held[:cut], self._held[cut:]
        return kind(text) if text else None


def _overlap(text: str, marker: str) -> int:
    """How many characters at the end of `text` are the beginning of `marker`."""
    return next((n for n in range(min(len(text), len(marker)), 0, -1) if text.endswith(marker[:n])), 0)
