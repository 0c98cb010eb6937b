"""A conversation as a template may see it: plain data, in which no string holds the name of a control token.

Each such name is exchanged for a placeholder before the template runs and put back, as text, after the rendered text
has been cut at the template's own control tokens.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from modicum.store import UserError
from modicum.tokenizer.literals import Literals

ROLES = ("system", "user", "assistant", "tool")


class Protected:
    """Messages and tools without control tokens' names, and the way back.

    Raises UserError naming the message for what is no conversation: an unknown role, content that is not a string,
    data that is not JSON, a lone surrogate.
    """

    def __init__(self, messages: Sequence[Mapping[str, Any]], tools: Any, literals: Literals) -> None:
        if isinstance(messages, str | Mapping) or not messages:
            raise UserError("a conversation needs at least one message: [{'role': 'user', 'content': '...'}]")
        try:
            plain = [_plain_message(message, f"message {n}") for n, message in enumerate(messages, 1)]
            plain_tools = _plain_tools(tools)
            self._nonce = _absent_word(plain, plain_tools)
            self._literals, self._originals = literals, list[str]()
            self.messages: list[dict[str, Any]] = self._protect(plain)
            self.tools: list[dict[str, Any]] | None = self._protect(plain_tools)
        except RecursionError:
            raise UserError("the conversation's messages or tools are nested too deeply") from None
        self._placeholder = re.compile(f"{self._nonce}x([0-9]+)x")

    def restore(self, text: str) -> str:
        """`text` with the user's own words back in their places.

        Raises UserError when the template tore a placeholder apart.
        """
        if not self._originals:
            return text
        restored = self._placeholder.sub(lambda match: self._originals[int(match[1])], text)
        if self._nonce in restored:
            raise UserError(
                "chat.template: it changes the text of a message that holds the name of a control token; such a "
                "template cannot keep that text from becoming the token"
            )
        return restored

    def _protect(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._protect_text(value)
        if isinstance(value, list):
            return [self._protect(item) for item in value]
        if isinstance(value, dict):
            return {self._protect_text(key): self._protect(item) for key, item in value.items()}
        return value

    def _protect_text(self, text: str) -> str:
        """Whole names, and what could become one beside the template's own words: `<|im_` at the end, for one."""
        if text in ROLES:
            return text
        found = [(start, end) for start, end, _ in self._literals.find(text)]
        front = self._literals.open_beginning(text)
        back = len(text) - self._literals.open_ending(text)
        if front and not any(start < front for start, _ in found):
            found.insert(0, (0, front))
        if back < len(text) and not any(end > back for _, end in found):
            found.append((back, len(text)))
        parts, place = [], 0
        for start, end in found:
            self._originals.append(text[start:end])
            parts += [text[place:start], f"{self._nonce}x{len(self._originals) - 1}x"]
            place = end
        return "".join([*parts, text[place:]])


def _plain_message(message: Any, where: str) -> dict[str, Any]:
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
    calls = plain.get("tool_calls", [])
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise UserError(f"{where}: tool_calls must be a list of objects")
    return plain


def _plain_tools(tools: Any) -> list[dict[str, Any]] | None:
    if not tools:
        return None
    plain = _plain(tools, "tools")
    if not isinstance(plain, list) or not all(isinstance(tool, dict) for tool in plain):
        raise UserError("tools: expected a list of JSON objects, one for each tool")
    return plain


def _plain(value: Any, where: str) -> Any:
    """`value` as exact JSON types: a template must not be handed an object with methods of its own."""
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


def _absent_word(*data: Any) -> str:
    """A word of lower-case letters and digits that stands nowhere in `data`, the same for the same data."""
    text = json.dumps(data, ensure_ascii=False)
    word, number = "", 0
    while not word or word in text:
        word = "q" + hashlib.sha256(f"{number}{text}".encode()).hexdigest()[:24]
        number += 1
    return word
