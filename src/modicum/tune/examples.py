"""A conversation as a training example: its ids, and which of them the loss counts.

The ids are the renderer's, whole and unchanged; one that is too long is the same conversation ended at an earlier
assistant turn, rendered again, so that every example reads like a conversation that was this long from the start.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

import numpy as np
import numpy.typing as npt

from modicum.corpus import Conversation
from modicum.store import UserError
from modicum.tokenizer import Tokenizer


@dataclass(frozen=True)
class Example:
    """One conversation: `ids` and `supervised` of equal length; `supervised[0]` is False, for nothing predicts it."""

    conversation: Conversation
    ids: list[int]
    supervised: list[bool]

    @property
    def supervised_tokens(self) -> int:
        return sum(self.supervised)


@dataclass(frozen=True)
class Examples:
    """Many examples as flat arrays: number i is `ids[starts[i]:starts[i + 1]]`, likewise `supervised`."""

    ids: npt.NDArray[np.uint32]
    supervised: npt.NDArray[np.bool_]
    starts: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, number: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_]]:
        if not 0 <= number < len(self):
            raise IndexError(number)
        span = slice(self.starts[number], self.starts[number + 1])
        return self.ids[span], self.supervised[span]

    def __iter__(self) -> Iterator[tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_]]]:
        return (self[number] for number in range(len(self)))

    def select(self, wanted: npt.NDArray[np.bool_]) -> "Examples":
        """The examples for which `wanted` (one truth value each) holds, in the same order."""
        lengths = self.lengths
        tokens = np.repeat(wanted, lengths)
        starts = np.concatenate([[0], np.cumsum(lengths[wanted])]).astype(np.int64)
        return Examples(self.ids[tokens], self.supervised[tokens], starts)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        return np.diff(self.starts)

    @property
    def supervised_tokens(self) -> int:
        return int(self.supervised.sum())

    @property
    def hash(self) -> str:
        """Hexadecimal SHA-256 of all of it."""
        digest = sha256()
        for part in (self.ids, self.supervised, self.starts):
            digest.update(np.ascontiguousarray(part).data)
        return digest.hexdigest()


class ExamplesBuilder:
    """Collects examples into flat arrays: five bytes a token, whatever the number of conversations."""

    def __init__(self) -> None:
        self._ids = array("I")
        self._supervised = bytearray()
        self._starts = array("q", [0])

    def add(self, example: Example) -> None:
        self._ids.extend(example.ids)
        self._supervised.extend(example.supervised)
        self._starts.append(len(self._ids))

    def build(self) -> Examples:
        return Examples(
            np.frombuffer(self._ids, dtype=np.uint32) if self._ids else np.empty(0, dtype=np.uint32),
            np.array(self._supervised, dtype=np.uint8).view(np.bool_),
            np.array(self._starts, dtype=np.int64),
        )


def make_example(conversation: Conversation, tokenizer: Tokenizer) -> Example:
    """The whole conversation as an example. Raises UserError, with file and line, when nothing in it is supervised."""
    try:
        rendered = tokenizer.render(conversation.messages, tools=conversation.tools)
    except UserError as error:
        raise UserError(f"{conversation.origin}: {error}") from None
    example = Example(conversation, rendered.ids, [False, *rendered.assistant_mask[1:]])
    if not example.supervised_tokens:
        raise UserError(
            f"{conversation.origin}: nothing to learn from, for none of its tokens is an assistant's: it needs an "
            "assistant turn, and the chat template must mark such turns with {% generation %}"
        )
    return example


def shorten(example: Example, tokenizer: Tokenizer, *, longest: int) -> Example | None:
    """The example, or the longest beginning of it, of at most `longest` tokens, that ends with a whole assistant turn.

    The system message and the first turns stay. None when not even the first assistant turn fits.
    """
    if len(example.ids) <= longest:
        return example
    messages = example.conversation.messages
    ends = [number for number, message in enumerate(messages, start=1) if message["role"] == "assistant"]
    best, low, high = None, 0, len(ends)
    while low < high:  # a longer beginning has more tokens, so halving finds the longest that fits
        middle = (low + high) // 2
        shorter = make_example(replace(example.conversation, messages=messages[: ends[middle]]), tokenizer)
        if len(shorter.ids) <= longest:
            best, low = shorter, middle + 1
        else:
            high = middle
    return best


def collect(examples: Sequence[Example]) -> Examples:
    """The examples as flat arrays, in the same order."""
    builder = ExamplesBuilder()
    for example in examples:
        builder.add(example)
    return builder.build()
