"""Text to ids by a backend that knows no control token, so that none can come out of it.

The tokenizers library's own `encode_special_tokens` is not enough: it goes on matching added tokens not flagged
special.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, TypeVar

import tokenizers

from modicum.store import UserError
from modicum.tokenizer.definition import json_text
from modicum.tokenizer.vocabulary import is_control

T = TypeVar("T")

# The library's regular-expression engine panics on a run of white space of more than ten million characters ("retry
# limit in match over"). Longer runs than this are encoded in parts.
LONGEST_WHITE_SPACE = 1 << 20


def guarded(call: Callable[[], T], what: str) -> T:
    """`call()`; the library's own failures, its panics included, become a UserError that begins with `what`."""
    try:
        return call()
    except (TypeError, MemoryError):
        raise
    except BaseException as error:
        # a panic of the Rust code is a BaseException whose class cannot be imported
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise UserError(f"{what}: {error}") from None


class PlainEncoder:
    """Encodes text as nothing but text. definition: a checked tokenizer.json."""

    def __init__(self, definition: Mapping[str, Any]) -> None:
        self._backend = guarded(
            lambda: tokenizers.Tokenizer.from_str(json_text(_without_control(definition))),
            "tokenizer.json cannot be used",
        )
        # Where no pattern cuts a text into words it stays whole: SentencePiece writes a space before each part.
        self._whole = definition.get("pre_tokenizer") is None

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, on all cores. Raises UserError for a lone surrogate, naming the text's place."""
        pieces = [[text] if self._whole else _pieces(text) for text in texts]
        try:
            encodings = guarded(
                lambda: self._backend.encode_batch_fast(list(chain(*pieces)), add_special_tokens=False),
                "the tokenizer's pattern fails on this text",
            )
        except TypeError:
            _refuse_lone_surrogates(texts)
            raise
        ids: Iterator[list[int]] = (encoding.ids for encoding in encodings)
        return [next(ids) if len(group) == 1 else list(chain(*islice(ids, len(group)))) for group in pieces]


def _without_control(definition: Mapping[str, Any]) -> dict[str, Any]:
    """The definition without control tokens, neither as added tokens nor in the vocabulary."""
    control = {entry["content"] for entry in definition["added_tokens"] if is_control(entry)}
    plain = [entry for entry in definition["added_tokens"] if not is_control(entry)]
    model = definition["model"]
    vocab = {token: number for token, number in model["vocab"].items() if token not in control}
    return {**definition, "added_tokens": plain, "model": {**model, "vocab": vocab}}


def _pieces(text: str) -> list[str]:
    """`text` whole, or cut so that no run of white space is longer than LONGEST_WHITE_SPACE."""
    if len(text) <= LONGEST_WHITE_SPACE:
        return [text]
    cuts = [0]
    for run in re.finditer(r"\s+", text):
        cuts += range(run.start() + LONGEST_WHITE_SPACE, run.end(), LONGEST_WHITE_SPACE)
    return [text[start:end] for start, end in zip(cuts, [*cuts[1:], len(text)], strict=True)]


def _refuse_lone_surrogates(texts: Sequence[str]) -> None:
    for number, text in enumerate(texts):
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            where = f"text {number + 1} of {len(texts)}, " if len(texts) > 1 else ""
            raise UserError(
                f"{where}character {error.start + 1}: a lone surrogate (U+{ord(text[error.start]):04X}) is no "
                "character and cannot be encoded; remove it, or decode the text it came from as UTF-8 or UTF-16"
            ) from None
