"""Bits per byte of held-out text: how well a model predicts, whatever its tokenizer.

Protocol. A document is the segment [bos] + tokens + [eot] (one token, <|endoftext|>, is both in our own tokenizers);
every token after the first is a target, the final eot too, and its bits are divided by the bytes of the text (UTF-8).
A segment longer than the context is read in windows that overlap by half: a target is scored once, in the first window
that holds it, so all but a document's first targets see at least half a context. Figures are sums over documents
divided by sums of bytes; the interval is over documents.
"""

import hashlib
import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from modicum.corpus import Document
from modicum.evaluate.bootstrap import ratio_interval
from modicum.evaluate.scoring import Scored, token_logprobs
from modicum.model import Decoder
from modicum.store import UserError
from modicum.tokenizer import Tokenizer

# Text encoded and scored at once; bounds memory, and is enough for batches of like length.
_GROUP_BYTES = 4_000_000
# More bytes a token than any text has: what must be kept to be sure of a number of tokens.
_BYTES_PER_TOKEN = 16


@dataclass(frozen=True)
class BitsPerByte:
    """Bits of all targets, bytes of all texts, targets (tokens) and documents; the 95 % interval is of bits / bytes,
    None for a single document."""

    bits: float
    bytes: int
    tokens: int
    documents: int
    low: float | None
    high: float | None

    @property
    def value(self) -> float:
        """Bits per byte."""
        return self.bits / self.bytes

    def to_dict(self) -> dict[str, Any]:
        """Every figure, bits_per_byte first."""
        return {"bits_per_byte": self.value, **asdict(self)}


@dataclass(frozen=True)
class HeldoutBits:
    """All documents, and those of each domain."""

    total: BitsPerByte
    domains: dict[str, BitsPerByte]

    def to_dict(self) -> dict[str, Any]:
        """Every figure, as plain data."""
        return {"total": self.total.to_dict(), "domains": {name: b.to_dict() for name, b in self.domains.items()}}


def bits_per_byte(
    model: Decoder,
    tokenizer: Tokenizer,
    documents: Iterable[Document],
    *,
    context: int | None = None,
    max_tokens: int | None = None,
    batch_tokens: int = 8192,
    bfloat16: bool = False,
    bootstrap_samples: int = 1000,
    seed: int = 0,
) -> HeldoutBits:
    """Score documents; those without text are left out.

    context: targets of one window, the model's maximum by default. max_tokens: score only a sample of documents, of
    about so many tokens; which ones, the seed and their ids decide, not their order. batch_tokens, bfloat16: see
    `token_logprobs`. Raises UserError when there is no text at all.
    """
    window = context or model.config.max_position_embeddings
    if not 2 <= window <= model.config.max_position_embeddings:
        raise UserError(f"context: expected 2 to {model.config.max_position_embeddings} tokens, found {window}")
    chosen = documents if max_tokens is None else _sample(documents, max_tokens * _BYTES_PER_TOKEN, seed)
    measured: list[tuple[str, float, int, int]] = []
    tokens = 0
    for group in _groups(chosen):
        segments = _segments(tokenizer, group)
        if max_tokens is not None:
            segments = _until(segments, max_tokens - tokens)
        bits = _bits(model, segments, window, batch_tokens, bfloat16)
        for document, segment, of_document in zip(group[: len(segments)], segments, bits, strict=True):
            measured.append((document.domain, of_document, len(document.text.encode()), len(segment) - 1))
            tokens += len(segment) - 1
        if max_tokens is not None and tokens >= max_tokens:
            break
    if not measured:
        raise UserError("no held-out text to measure bits per byte on; hold more documents out")
    names = sorted({domain for domain, *_ in measured})
    sums = [_sum([m for m in measured if name in (None, m[0])], bootstrap_samples, seed) for name in (None, *names)]
    return HeldoutBits(sums[0], dict(zip(names, sums[1:], strict=True)))


def _segments(tokenizer: Tokenizer, group: list[Document]) -> list[list[int]]:
    bos, eot = tokenizer.bos_id, tokenizer.eot_id
    return [[bos, *ids, eot] for ids in tokenizer.encode_batch([document.text for document in group])]


def _bits(model: Decoder, segments: list[list[int]], window: int, batch_tokens: int, bfloat16: bool) -> list[float]:
    """Bits of all targets of each segment."""
    pieces, owners = [], []
    for number, segment in enumerate(segments):
        for piece in windows(segment, window):
            pieces.append(piece)
            owners.append(number)
    bits = [0.0] * len(segments)
    scores = token_logprobs(model, pieces, batch_tokens=batch_tokens, bfloat16=bfloat16)
    for number, logprobs in zip(owners, scores, strict=True):
        bits[number] -= float(logprobs.sum()) / math.log(2)
    return bits


def windows(segment: list[int], window: int) -> list[Scored]:
    """A segment cut into windows of at most `window` targets; each target is scored in exactly one of them."""
    targets = len(segment) - 1
    end = min(window, targets)
    pieces = [Scored(segment[: end + 1], 1)]
    while end < targets:
        done, end = end, min(end + window // 2, targets)
        start = end - window
        pieces.append(Scored(segment[start : end + 1], done - start + 1))
    return pieces


def _sum(measured: list[tuple[str, float, int, int]], samples: int, seed: int) -> BitsPerByte:
    bits, sizes = [m[1] for m in measured], [m[2] for m in measured]
    low, high = ratio_interval(bits, sizes, samples=samples, seed=seed)
    return BitsPerByte(math.fsum(bits), sum(sizes), sum(m[3] for m in measured), len(measured), low, high)


def _groups(documents: Iterable[Document]) -> Iterator[list[Document]]:
    group: list[Document] = []
    size = 0
    for document in documents:
        if not document.text:
            continue
        group.append(document)
        size += len(document.text)
        if size >= _GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _until(segments: list[list[int]], tokens: int) -> list[list[int]]:
    """The first segments, up to and with the one that reaches so many targets."""
    kept = []
    for segment in segments:
        if tokens <= 0:
            break
        kept.append(segment)
        tokens -= len(segment) - 1
    return kept


def _sample(documents: Iterable[Document], size: int, seed: int) -> list[Document]:
    """Documents of at least `size` characters together (or all), in an order that the seed and their ids decide."""
    heap: list[tuple[int, int, Document]] = []
    total = 0
    for number, document in enumerate(documents):
        if not document.text:
            continue
        digest = hashlib.sha256(f"{seed}\0{document.source}\0{document.id}".encode()).digest()
        heapq.heappush(heap, (-int.from_bytes(digest[:8], "big"), number, document))
        total += len(document.text)
        while total - len(heap[0][2].text) >= size:
            total -= len(heapq.heappop(heap)[2].text)
    return [document for *_, document in sorted(heap, key=lambda entry: (-entry[0], entry[1]))]
