"""Which tokens of the user's own conversations the loss counts: shown to be read, and checked against the messages."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from modicum.corpus import Conversation, read_conversations
from modicum.doctor.finding import Finding, judged
from modicum.store import UserError
from modicum.tokenizer import Tokenizer
from modicum.tune import explain_mask

CHECKED = 500
SHOWN = 3


@dataclass(frozen=True)
class MarkedConversation:
    """A conversation as it is rendered, in pieces, each with whether it is supervised."""

    origin: str
    pieces: list[tuple[str, bool]]


def mask_boundaries(
    paths: Iterable[Path], tokenizer: Tokenizer, *, own_template: bool = False
) -> tuple[Finding, list[MarkedConversation]]:
    """Checks the first CHECKED conversations and returns the first SHOWN of them, marked.

    In each: as many supervised pieces as assistant turns; each holds that turn's text and ends with a control token;
    nothing of another role is supervised; and the prompt that serving would send for the last answer is what the
    example begins with, token by token. own_template: the chat template is the user's, and so is its fault.
    """
    name = "supervised tokens"
    shown: list[MarkedConversation] = []
    checked = supervised = total = 0
    try:
        for conversation in islice(_conversations(paths), CHECKED):
            pieces = explain_mask(conversation, tokenizer)
            fault = mask_fault(conversation, pieces, tokenizer) or prompt_fault(conversation, tokenizer)
            if fault:
                return judged(name, False, f"{conversation.origin}: {fault}", yours=own_template), shown
            if len(shown) < SHOWN:
                shown.append(MarkedConversation(conversation.origin, pieces))
            checked += 1
            supervised += sum(len(text) for text, counts in pieces if counts)
            total += sum(len(text) for text, _ in pieces)
    except UserError as error:
        return judged(name, False, str(error).splitlines()[0], yours=True), shown
    share = supervised / total if total else 0.0
    detail = f"{checked} conversations: every answer and its end, nothing else ({share:.0%} of the characters)"
    return judged(name, checked > 0, detail if checked else "no conversation to look at", yours=True), shown


def mask_fault(conversation: Conversation, pieces: list[tuple[str, bool]], tokenizer: Tokenizer) -> str | None:
    """What is wrong with the supervised pieces of a conversation; None when they are its answers and their ends."""
    turns = [message for message in conversation.messages if message["role"] == "assistant"]
    supervised = [text for text, counts in pieces if counts]
    if len(supervised) != len(turns):
        return f"{len(turns)} assistant turns, but {len(supervised)} supervised pieces"
    ends = {tokenizer.decode([token]) for token in tokenizer.special_ids}
    for number, (text, turn) in enumerate(zip(supervised, turns, strict=True), start=1):
        # a loaded tokenizer may bring text into another form, so the answer is compared in what it makes of it
        answer = tokenizer.decode(tokenizer.encode(turn["content"].strip()))
        if answer not in text:
            return f"supervised piece {number} does not hold the answer, but {text[:60]!r}"
        if not text.endswith(tuple(ends)):
            return f"the end of answer {number} is not supervised: the model would never stop"
        rest = _without_control(text.replace(answer, "", 1), ends).strip()
        if rest and not turn.get("tool_calls"):  # a call is the assistant's own, written out by the template
            return f"supervised piece {number} holds more than the answer: {rest[:60]!r}"
    return None


def prompt_fault(conversation: Conversation, tokenizer: Tokenizer) -> str | None:
    """Whether the prompt served for the last answer is, token by token, what the example begins with."""
    last = max(place for place, message in enumerate(conversation.messages) if message["role"] == "assistant")
    tools = conversation.tools
    prompt = tokenizer.render(conversation.messages[:last], add_generation_prompt=True, tools=tools)
    example = tokenizer.render(conversation.messages[: last + 1], tools=tools)
    if example.ids[: len(prompt.ids)] != prompt.ids:
        return "the prompt that serving sends is not what the example begins with"
    return None


def _without_control(text: str, control: Iterable[str]) -> str:
    for literal in control:
        text = text.replace(literal, "")
    return text


def _conversations(paths: Iterable[Path]) -> Iterator[Conversation]:
    for path in paths:
        yield from read_conversations(path)
