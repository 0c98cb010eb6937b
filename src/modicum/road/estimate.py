"""How much text a recipe names, before any of it has been prepared: bytes read or extrapolated, tokens estimated.

Where a run has shards already, their index is exact and these estimates are not asked.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from math import log2
from pathlib import Path

from modicum.corpus import read_conversations
from modicum.corpus.inputs import find_files
from modicum.corpus.records import bytes_until, read_file
from modicum.recipe import SourceSettings
from modicum.tune.packing import Packing

# Bytes of UTF-8 a token by vocabulary, measured: the shipped corpus, a byte-level BPE trained on 95 % of its documents
# and counted on the rest. Other text, above all other languages and code, may differ by a third.
_BYTES_PER_TOKEN = {
    320: 1.38,
    512: 1.97,
    1024: 2.54,
    2048: 3.07,
    4096: 3.57,
    8192: 3.98,
    16_384: 4.25,
    32_768: 4.41,
}
# In the shipped conversations, which are short, a token is a tenth shorter, and a turn's markers are five more.
_TALK, _MARKERS = 0.9, 5
_READ_BYTES = 48 * 2**20  # of text, per source; what is beyond is extrapolated from file sizes
_READ_CONVERSATIONS = 50_000


@dataclass(frozen=True)
class TextSize:
    """UTF-8 bytes of text; `exact` when all of it was read. None: a Hub data set, whose size is not known here."""

    bytes: int | None
    exact: bool


def bytes_per_token(vocab_size: int) -> float:
    """Estimated bytes of English text a token, interpolated in the logarithm of the vocabulary."""
    sizes = sorted(_BYTES_PER_TOKEN)
    if vocab_size <= sizes[0] or vocab_size >= sizes[-1]:
        return _BYTES_PER_TOKEN[sizes[0] if vocab_size <= sizes[0] else sizes[-1]]
    above = next(place for place, size in enumerate(sizes) if size >= vocab_size)
    low, high = sizes[above - 1], sizes[above]
    share = (log2(vocab_size) - log2(low)) / (log2(high) - log2(low))
    return _BYTES_PER_TOKEN[low] * (1 - share) + _BYTES_PER_TOKEN[high] * share


def source_text(source: SourceSettings, *, read_bytes: int = _READ_BYTES) -> TextSize:
    """The text of a source: read up to `read_bytes`, the rest by file sizes. Raises UserError as reading does."""
    files = find_files(source)
    if files.root is None:
        return TextSize(None, False)
    text = packed = 0
    for name, size in zip(files.names, files.sizes, strict=True):
        for number, record in enumerate(read_file(source, files.root, name), 1):
            text += len(record.text.encode("utf-8", "replace"))
            if text > read_bytes:
                packed += bytes_until(files.root / name, number)
                return TextSize(round(text * max(1.0, sum(files.sizes) / packed)), False)
        packed += size
    return TextSize(text, True)


@dataclass(frozen=True)
class Talk:
    """Fine-tuning data: conversations, their tokens, and the rows that one pass takes."""

    conversations: int
    tokens: int
    rows: int
    exact: bool


def talk(paths: Sequence[Path], *, vocab_size: int, sequence_length: int, heldout_fraction: float) -> Talk:
    """The conversations of some files, their tokens estimated; many are extrapolated from the first ones."""
    lengths: list[int] = []
    rate = _TALK * bytes_per_token(vocab_size)
    packed, exact = 0, True
    for path in paths:
        before = len(lengths)
        for conversation in islice(read_conversations(path), _READ_CONVERSATIONS - before):
            size = sum(len(message["content"].encode("utf-8", "replace")) for message in conversation.messages)
            lengths.append(round(size / rate) + _MARKERS * len(conversation.messages))
        exact = len(lengths) < _READ_CONVERSATIONS
        packed += path.stat().st_size if exact else bytes_until(path, len(lengths) - before)
        if not exact:
            break
    scale = 1.0 if exact else max(1.0, sum(path.stat().st_size for path in paths) / packed)
    kept = [min(length, sequence_length + 1) for length in lengths]
    scale *= 1 - heldout_fraction
    rows = Packing(kept, sequence_length + 1).rows
    return Talk(round(len(kept) * scale), round(sum(kept) * scale), max(1, round(rows * scale)), exact)
