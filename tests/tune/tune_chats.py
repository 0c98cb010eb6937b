"""Conversations as tests write them."""

from pathlib import Path
from typing import Any

from modicum.corpus import Conversation

INSTRUCT = Path(__file__).parents[2] / "data" / "small" / "instruct.jsonl.gz"


def turns(*contents: str, system: str | None = None) -> list[dict[str, Any]]:
    """A user's and an assistant's messages in turn."""
    opening = [{"role": "system", "content": system}] if system is not None else []
    return opening + [
        {"role": ("user", "assistant")[place % 2], "content": content} for place, content in enumerate(contents)
    ]


def conversation(*contents: str, system: str | None = None) -> Conversation:
    return Conversation(turns(*contents, system=system), "chat.jsonl:1", None, None)
