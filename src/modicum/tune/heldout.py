"""Which conversations are held out: a function of the seed and the opening question, of nothing else.

Everything that opens with the same question falls on the same side, so neither a conversation nor its question is
both trained and evaluated on. Neither the order of lines nor other conversations matter: more data moves none over.
"""

import hashlib
import json
import re

from modicum.corpus import Conversation

_WORD = re.compile(r"\w+")


def draw(conversation: Conversation, seed: int) -> float:
    """A number in [0, 1), uniform over opening questions; the conversation is held out when it is below the share."""
    digest = hashlib.sha256(f"{seed}\0{_opening(conversation)}".encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def fingerprint(conversation: Conversation) -> bytes:
    """Equal for two conversations exactly when their messages and tools are."""
    plain = json.dumps([conversation.messages, conversation.tools], sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(plain.encode("ascii")).digest()


def _opening(conversation: Conversation) -> str:
    """The words of the first user message, case and punctuation left aside: "Hello!" and "hello" are one question.

    Without words, the message as it is; without a user message, all messages.
    """
    for message in conversation.messages:
        if message["role"] == "user":
            return " ".join(_WORD.findall(message["content"].casefold())) or message["content"]
    return json.dumps(conversation.messages, sort_keys=True)
