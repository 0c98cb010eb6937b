"""What stands in a tokenizer.json: which tokens are control tokens, and the bytes of each token."""

import re
from collections.abc import Mapping
from typing import Any

from modicum.tokenizer.special import NEEDED_TOKENS


def is_control(entry: Mapping[str, Any]) -> bool:
    """Whether an added token steers the model, so that text from outside must never become it.

    Flagged special, one of those we need, or written like a marker (`<think>`, `[INST]`): some tokenizers leave such
    tokens unflagged so that decoding shows them. Added words and runs of spaces are text.
    """
    content = entry["content"]
    return entry["special"] or content in NEEDED_TOKENS or bool(re.fullmatch(r"<.+>|\[.+\]", content, re.DOTALL))


def byte_characters() -> dict[str, int]:
    """The visible character that byte-level BPE writes for each byte -> the byte.

    GPT-2's table: printable Latin-1 stands for itself, the other 68 bytes take the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}


def is_byte_level(definition: Mapping[str, Any]) -> bool:
    """Whether tokens are written in the characters of `byte_characters`."""
    decoder = definition.get("decoder") or {}
    parts = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    return any(part.get("type") == "ByteLevel" for part in parts)


def token_bytes(definition: Mapping[str, Any]) -> list[bytes]:
    """The bytes of every token, by id (added tokens stand in the vocabulary too). A control token's are its own name;
    an id without a token has none.
    """
    ids = definition["model"]["vocab"]
    added = {entry["content"] for entry in definition["added_tokens"]}
    found = [b""] * (max(ids.values()) + 1)
    table = byte_characters() if is_byte_level(definition) else None
    for token, token_id in ids.items():
        if token in added:
            found[token_id] = token.encode("utf-8")
        elif table is None:
            found[token_id] = _piece_bytes(token)
        elif all(character in table for character in token):
            found[token_id] = bytes(table[character] for character in token)
        else:
            found[token_id] = token.encode("utf-8")
    return found


def _piece_bytes(token: str) -> bytes:
    """A SentencePiece-style token: <0x0A> is a byte, and ▁ (U+2581) stands for a space."""
    byte = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode("utf-8")
