"""Conversations for fine-tuning: {"messages": [{"role": ..., "content": ...}, ...]} lines, checked turn by turn."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modicum.corpus.files import kind, read_json_lines
from modicum.store import UserError

# who may speak after whom; None is the start
_FOLLOWS: dict[str | None, tuple[str, ...]] = {
    None: ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}


@dataclass(frozen=True)
class Conversation:
    """messages: {"role", "content"} and, where an assistant calls tools, "tool_calls". origin: "file:line"."""

    messages: list[dict[str, Any]]
    origin: str
    source: str | None
    tools: list[dict[str, Any]] | None


def read_conversations(path: Path) -> Iterator[Conversation]:
    """Every conversation of a .jsonl file (also .gz, .zst), in its order; keys that are not known are ignored.

    Raises UserError with file and line at the first one that is not: a system message first or not at all, then user
    and assistant in turn (tool results between an assistant's turns), at least one assistant turn, content as text.
    """
    for number, record in read_json_lines(path):
        origin = f"{path}:{number}"
        messages = record.get("messages")
        if not isinstance(messages, list) or not messages:
            raise UserError(
                f'{origin}: expected "messages", a list of {{"role", "content"}} objects; the line has '
                f"{', '.join(sorted(record)) or 'no keys'}"
            )
        turns = [_message(message, f"{origin}: message {i}") for i, message in enumerate(messages, 1)]
        _check_order([turn["role"] for turn in turns], origin)
        yield Conversation(turns, origin, _source(record, origin), _tools(record, origin))


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise UserError(f"{where}: expected an object with role and content, found {kind(message)}")
    role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls")
    if not isinstance(role, str) or role not in _FOLLOWS:
        raise UserError(f"{where}: role is {role!r}; expected system, user, assistant or tool")
    if calls:
        if role != "assistant" or not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise UserError(f"{where}: tool_calls must be a list of objects, in an assistant's message")
        content = "" if content is None else content
    if not isinstance(content, str):
        raise UserError(f"{where}: content must be a string, found {kind(content)}")
    if not content.strip() and role != "tool" and not calls:
        raise UserError(f"{where}: the content of the {role}'s message is blank; take the conversation out")
    return {"role": role, "content": content, "tool_calls": calls} if calls else {"role": role, "content": content}


def _check_order(roles: list[str], origin: str) -> None:
    before: str | None = None
    for i, role in enumerate(roles, 1):
        if role not in _FOLLOWS[before]:
            place = f"after {before}" if before else "at the start"
            allowed = " or ".join(_FOLLOWS[before])
            raise UserError(f"{origin}: message {i}: {role} {place}; expected {allowed}")
        before = role
    if "assistant" not in roles:
        raise UserError(f"{origin}: no assistant message, so there is nothing to learn from it; take it out")


def _source(record: dict[str, Any], origin: str) -> str | None:
    source = record.get("source")
    if source is not None and not isinstance(source, str):
        raise UserError(f"{origin}: source must be a string, found {kind(source)}")
    return source


def _tools(record: dict[str, Any], origin: str) -> list[dict[str, Any]] | None:
    tools = record.get("tools")
    if tools is not None and (not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools)):
        raise UserError(f"{origin}: tools must be a list of objects (JSON schemas of functions)")
    return tools or None
