"""Requests to token ids: conversations by the tokenizer's one renderer, texts as they are."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from modicum.generate import Generator
from modicum.serve.errors import ApiError, bad_request
from modicum.serve.requests import CompletionRequest, Message, Tool
from modicum.serve.tools import wants_objects
from modicum.tokenizer import Tokenizer


@dataclass(frozen=True)
class Prompt:
    """ids, at least one; text: of a completion request, None where it came as ids. folded: the answer's first text
    begins with the white space that the tokenizer left out at the prompt's end."""

    ids: list[int]
    text: str | None = None
    folded: bool = False


def chat_prompt(generator: Generator, messages: Sequence[Message], tools: Sequence[Tool]) -> Prompt:
    """The ids of a conversation up to the answer. Raises ApiError 400 for one that cannot be rendered, or that leaves
    no room for an answer."""
    turns = len(messages) + sum(len(message.tool_calls or ()) for message in messages)
    if turns >= generator.context:  # each has a token at least
        raise _too_long(generator, f"{turns:,} messages and tool calls", "messages")
    plain = [_plain(message, f"messages.{number}") for number, message in enumerate(messages)]
    _check_length(generator, sum(_characters(message) for message in plain), "messages")
    calls = [call["function"] for message in plain for call in message.get("tool_calls", ())]
    if calls and wants_objects(generator.tokenizer):
        for call in calls:
            call["arguments"] = json.loads(call["arguments"])
    offered = [tool.model_dump(exclude_none=True) for tool in tools] or None
    rendered = generator.tokenizer.render(plain, add_generation_prompt=True, tools=offered, masked=False)
    _check_room(generator, len(rendered.ids), "messages")
    last = generator.tokenizer.id_bytes(rendered.ids[-1])
    return Prompt(rendered.ids, folded=rendered.text[-1:].isspace() and not last[-1:].isspace())


def prompt_count(request: CompletionRequest) -> int:
    """How many prompts a request has, before they are read."""
    given = request.prompt
    return 1 if isinstance(given, str) or any(isinstance(one, int) for one in given[:1]) else len(given)


def completion_prompts(generator: Generator, request: CompletionRequest) -> list[Prompt]:
    """One prompt for each text or list of ids. Before a text stands what the generator has to open one."""
    given = request.prompt
    if isinstance(given, str):
        return [_text(generator, given)]
    if not given:
        raise bad_request("prompt: an empty list", "prompt")
    prompts = []
    for one in given:
        if isinstance(one, str):
            prompts.append(_text(generator, one))
        elif isinstance(one, int):
            return [_ids(generator, [i for i in given if isinstance(i, int)])]
        else:
            prompts.append(_ids(generator, one))
    return prompts


def _text(generator: Generator, text: str) -> Prompt:
    _check_length(generator, len(text), "prompt")
    ids = generator.text_prompt(text)
    _check_room(generator, len(ids), "prompt")
    return Prompt(ids, text)


def _ids(generator: Generator, ids: list[int]) -> Prompt:
    _check_room(generator, len(ids), "prompt")
    return Prompt(ids or [generator.tokenizer.bos_id])


def _plain(message: Message, where: str) -> dict[str, Any]:
    """The message as the renderer takes it."""
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "name": message.name, "tool_call_id": message.tool_call_id}
    content = message.content
    if isinstance(content, list):
        content = "".join(part.text for part in content)
    if content is None and not (role == "assistant" and message.tool_calls):
        raise bad_request(f"{where}: content is missing", f"{where}.content")
    plain["content"] = content or ""
    if message.tool_calls:
        for call in message.tool_calls:
            _check_arguments(call.function.arguments, where)
        plain["tool_calls"] = [call.model_dump() for call in message.tool_calls]
    return {key: value for key, value in plain.items() if value is not None}


def _characters(value: Any) -> int:
    """Of all texts in a message."""
    if isinstance(value, dict):
        return sum(map(_characters, value.values()))
    return sum(map(_characters, value)) if isinstance(value, list) else len(value)


def _check_arguments(arguments: str, where: str) -> None:
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise bad_request(f"{where}: a tool call's arguments are not a JSON object", f"{where}.tool_calls")


@lru_cache(maxsize=4)
def _longest(tokenizer: Tokenizer) -> int:
    """Bytes of its longest token."""
    return max(len(tokenizer.id_bytes(i)) for i in range(tokenizer.vocab_size))


def _check_length(generator: Generator, characters: int, param: str) -> None:
    """Refuse what cannot fit before it costs the time of encoding it, even where the template leaves some out: no token
    has so many characters."""
    if characters > generator.context * _longest(generator.tokenizer):
        raise _too_long(generator, f"{characters:,} characters", param)


def _check_room(generator: Generator, tokens: int, param: str) -> None:
    if tokens >= generator.context:
        raise _too_long(generator, f"{tokens:,} tokens", param)


def _too_long(generator: Generator, size: str, param: str) -> ApiError:
    return bad_request(
        f"{param}: {size} leave no room for an answer in this model's context of {generator.context:,} tokens; "
        "shorten it",
        param,
        "context_length_exceeded",
    )
