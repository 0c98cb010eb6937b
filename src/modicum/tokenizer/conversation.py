"""A conversation as a template may see it: plain data, in which no string holds the name of a control token.

Each such name is exchanged for a character of Unicode's private use before the template runs, and put back, as text,
after what it wrote has been cut at its own control tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from modicum.store import UserError
from modicum.tokenizer.literals import Literals
from modicum.tokenizer.special import THOUGHT, THOUGHT_END

ROLES = ("system", "user", "assistant", "tool")
LARGEST_INTEGER_BITS = 1024
PRIVATE_USE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))

Region = tuple[int, int]  # (start, end) in characters


class Conversation:
    """Messages and tools, as they are and with names hidden.

    messages, tools: hidden. plain_messages, plain_tools: as they are. holds_names: whether a whole name stands in them.
    hides: whether anything is hidden at all. thoughts: whether an answer's, which stand before `</think>` in its
    content, are set apart as reasoning_content. avoid: a text whose characters stand for nothing.
    Raises UserError naming the message for what is no conversation: an unknown role, content that is not a string,
    data that is not JSON, a lone surrogate.
    """

    def __init__(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Any,
        literals: Literals,
        *,
        thoughts: bool = False,
        avoid: str = "",
    ) -> None:
        if isinstance(messages, str | Mapping) or not messages:
            raise UserError("a conversation needs at least one message: [{'role': 'user', 'content': '...'}]")
        try:
            self.plain_messages = [_plain_message(message, f"message {n}") for n, message in enumerate(messages, 1)]
            if thoughts:
                self.plain_messages = [_thoughts_apart(message) for message in self.plain_messages]
            self.plain_tools = _plain_tools(tools)
            strings = list(_strings([self.plain_messages, self.plain_tools]))
            self._literals = literals
            self._free = _absent_characters(set(avoid).union(*strings))
            self._characters: dict[str, str] = {}
            self.messages = [{**self._hide(message), "role": message["role"]} for message in self.plain_messages]
            self.tools: list[dict[str, Any]] | None = self._hide(self.plain_tools)
        except RecursionError:
            raise UserError("the conversation's messages or tools are nested too deeply") from None
        self.hides = bool(self._characters)
        self.holds_names = self.hides and any(next(literals.find(text), None) for text in strings)
        self._back = str.maketrans({character: text for text, character in self._characters.items()})

    def restore(self, text: str) -> str:
        """`text` with what was hidden back in its places."""
        return text.translate(self._back) if self.hides else text

    def _hide(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._exchange(value, self._hidden(value))
        if isinstance(value, list):
            return [self._hide(item) for item in value]
        if isinstance(value, dict):
            # a key is what a template asks for, so only whole names are exchanged in it
            return {self._exchange(key, self._names(key)): self._hide(item) for key, item in value.items()}
        return value

    def _names(self, text: str) -> list[Region]:
        return [(start, end) for start, end, _ in self._literals.find(text)]

    def _hidden(self, text: str) -> list[Region]:
        """The parts of `text` that must not meet the template's words: whole names, and at its edges (or as a whole)
        what could become one beside them, as `<|im_` before `end|>`."""
        whole = self._names(text)
        if not whole and self._literals.inside(text):
            return [(0, len(text))]
        front = self._literals.open_beginning(text[: whole[0][0]] if whole else text)
        back = len(text) - self._literals.open_ending(text[whole[-1][1] :] if whole else text)
        if not whole and front > back:
            return [(0, len(text))]
        return [region for region in ((0, front), *whole, (back, len(text))) if region[0] < region[1]]

    def _exchange(self, text: str, hidden: list[Region]) -> str:
        parts, place = [], 0
        for start, end in hidden:
            part = text[start:end]
            if part not in self._characters:
                self._characters[part] = next(self._free)
            parts += [text[place:start], self._characters[part]]
            place = end
        return "".join([*parts, text[place:]])


def _absent_characters(taken: set[str]) -> Iterator[str]:
    """Private-use characters that are not in `taken`, always in the same order."""
    yield from (character for code in chain(*PRIVATE_USE) if (character := chr(code)) not in taken)
    raise UserError("the conversation holds every private-use character of Unicode, so none can stand for a name")


def _strings(value: Any) -> Iterator[str]:
    """Every string in plain data, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _strings(item)


def _plain_message(message: Any, where: str) -> dict[str, Any]:
    """The message without keys that hold None, as transformers drops them; the assistant's content trimmed, so that no
    token reaches over the end of the prompt that stands before it."""
    if not isinstance(message, Mapping):
        raise UserError(f"{where}: expected an object with role and content, found {type(message).__name__}")
    plain: dict[str, Any] = {k: _plain(v, f"{where}, {k}") for k, v in message.items() if v is not None}
    role = plain.get("role")
    if role not in ROLES:
        raise UserError(f"{where}: unknown role {role!r}; expected one of {', '.join(ROLES)}")
    if not isinstance(plain.get("content", ""), str):
        raise UserError(f"{where}: content must be a string, found {type(plain['content']).__name__}")
    if role != "assistant" and "content" not in plain:
        raise UserError(f"{where}: a message of role {role} needs content")
    if role == "assistant" and "content" in plain:
        plain["content"] = plain["content"].strip()
    calls = plain.get("tool_calls", [])
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise UserError(f"{where}: tool_calls must be a list of objects")
    return plain


def _thoughts_apart(message: dict[str, Any]) -> dict[str, Any]:
    """An answer with its thoughts in reasoning_content, where templates that know them look before they cut content."""
    before, end, answer = message.get("content", "").rpartition(THOUGHT_END)
    if message["role"] != "assistant" or not end:
        return message
    thoughts = before.rpartition(THOUGHT)[2].strip("\n")
    return {"reasoning_content": thoughts, **message, "content": answer.strip()}


def _plain_tools(tools: Any) -> list[dict[str, Any]] | None:
    if not tools:
        return None
    plain = _plain(tools, "tools")
    if not isinstance(plain, list) or not all(isinstance(tool, dict) for tool in plain):
        raise UserError("tools: expected a list of JSON objects, one for each tool")
    return plain


def _plain(value: Any, where: str) -> Any:
    """`value` as exact JSON types: a template must not be handed an object with methods of its own."""
    if type(value) is int and value.bit_length() > LARGEST_INTEGER_BITS:
        raise UserError(f"{where}: an integer of {value.bit_length()} bits; send it as a string")
    if value is None or type(value) in (bool, int, float):
        return value
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UserError(
                f"{where}: a lone surrogate (U+{ord(value[error.start]):04X}) at character {error.start + 1} is no "
                "character and cannot be encoded; remove it"
            ) from None
        return str(value)
    if isinstance(value, list | tuple):
        return [_plain(item, where) for item in value]
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise UserError(f"{where}: keys must be strings, as in JSON")
        return {_plain(key, where): _plain(item, where) for key, item in value.items()}
    raise UserError(f"{where}: {type(value).__name__} is not JSON data")
