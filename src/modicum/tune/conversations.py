"""Files of conversations into training examples and held-out conversations, with a report of what became of each.

A conversation is rendered once, by the renderer that serving uses. What is left out is counted, with the file and
line of the first one; what cannot teach anything is refused.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import nextafter
from pathlib import Path

import numpy as np

from modicum.corpus import Contamination, Conversation, clean, read_conversations
from modicum.store import UserError
from modicum.tokenizer import Tokenizer
from modicum.tune.examples import Example, Examples, ExamplesBuilder, make_example, shorten
from modicum.tune.heldout import draw, fingerprint


@dataclass
class Count:
    """How many conversations something happened to, and the first one's file:line."""

    conversations: int = 0
    first: str | None = None

    def add(self, origin: str) -> None:
        self.conversations += 1
        self.first = self.first or origin


@dataclass
class ConversationReport:
    """What became of the conversations: read = duplicates + contaminated + too_long + train + heldout; a shortened one
    was kept.

    `tokens` and `supervised_tokens` count the training examples.
    """

    read: int = 0
    duplicates: Count = field(default_factory=Count)
    contaminated: Count = field(default_factory=Count)
    shortened: Count = field(default_factory=Count)
    too_long: Count = field(default_factory=Count)
    train: int = 0
    heldout: int = 0
    tokens: int = 0
    supervised_tokens: int = 0


@dataclass(frozen=True)
class ConversationSplit:
    """Examples ready for packing; and what is held out, also as conversations (shortened where the examples are)."""

    train: Examples
    heldout_examples: Examples
    heldout: list[Conversation]
    report: ConversationReport


def load_conversations(
    paths: Sequence[Path],
    tokenizer: Tokenizer,
    *,
    sequence_length: int,
    heldout_fraction: float,
    seed: int,
    avoid: Contamination | None = None,
) -> ConversationSplit:
    """Read, render, shorten and split the conversations of `paths` ({"messages": [...]} lines; .jsonl, .gz, .zst).

    An example has at most `sequence_length` + 1 tokens: that many inputs, and the target after the last. A longer one
    is ended at an earlier assistant turn; when not even the first fits, it is left out and counted. An exact repetition
    (messages and tools) is left out and counted: files joined twice would otherwise weigh double without a word. So is
    one with a message that holds a text to `avoid`, whose answer an evaluation will ask for.

    Held out are about `heldout_fraction` of the conversations, chosen by (seed, opening question): see heldout.py.
    Where chance picks none or all of them, exactly one opening question is held out; a fraction of 0 holds out none.

    Raises UserError, with file and line, for a conversation in which nothing is supervised; when none fits; when there
    is none; and when one opening question is all there is, so that nothing could be held out.
    """
    report, builder = ConversationReport(), ExamplesBuilder()
    draws: list[float] = []
    candidates: list[tuple[float, Conversation]] = []
    lowest = 1.0
    avoid = avoid or Contamination.of((), 0)
    for example in _kept_examples(paths, tokenizer, sequence_length + 1, avoid, report):
        builder.add(example)
        number = draw(example.conversation, seed)
        draws.append(number)
        lowest = min(lowest, number)
        if number <= max(lowest, heldout_fraction):
            candidates.append((number, example.conversation))
    limit = _limit(draws, heldout_fraction, paths)
    kept, is_heldout = builder.build(), np.array(draws) < limit
    train = kept.select(~is_heldout)
    heldout = [conversation for number, conversation in candidates if number < limit]
    report.train, report.heldout = len(train), len(heldout)
    report.tokens, report.supervised_tokens = len(train.ids), train.supervised_tokens
    return ConversationSplit(train, kept.select(is_heldout), heldout, report)


def _kept_examples(
    paths: Sequence[Path], tokenizer: Tokenizer, longest: int, avoid: Contamination, report: ConversationReport
) -> Iterator[Example]:
    """The examples that stay, in the order of the files, counting into `report` those that do not."""
    seen: set[bytes] = set()
    for conversation in (conversation for path in paths for conversation in read_conversations(path)):
        report.read += 1
        mark = fingerprint(conversation)
        if mark in seen:
            report.duplicates.add(conversation.origin)
            continue
        seen.add(mark)
        if any(avoid.found_in(clean(message["content"])) for message in conversation.messages):
            report.contaminated.add(conversation.origin)
            continue
        whole = make_example(conversation, tokenizer)
        example = shorten(whole, tokenizer, longest=longest)
        if example is None:
            report.too_long.add(conversation.origin)
            continue
        if example is not whole:
            report.shortened.add(conversation.origin)
        yield example
    if not report.read:
        raise UserError(f'{_names(paths)}: no conversations; expected lines of the form {{"messages": [...]}}')
    contaminated, too_long = report.contaminated, report.too_long
    if report.duplicates.conversations + contaminated.conversations + too_long.conversations < report.read:
        return
    if not too_long.conversations:
        raise UserError(
            f"{contaminated.first}: holds a question of evaluate.items, and so does every other of the {report.read} "
            "conversations; tune on others, or ask others"
        )
    raise UserError(
        f"{too_long.first}: longer than {longest} tokens before its first assistant turn ends, and so is every other "
        f"of the {report.read - contaminated.conversations} conversations; raise sft.sequence_length"
    )


def _limit(draws: Sequence[float], heldout_fraction: float, paths: Sequence[Path]) -> float:
    """Draws below this are held out."""
    if not heldout_fraction or min(draws) < heldout_fraction <= max(draws):
        return heldout_fraction
    if min(draws) == max(draws):
        raise UserError(
            f"{_names(paths)}: every conversation opens with the same question, so none can be held out for "
            "evaluation; add others"
        )
    return nextafter(min(draws), 1.0)


def _names(paths: Sequence[Path]) -> str:
    return ", ".join(str(path) for path in paths)
