"""A uniform sample of a stream of texts, capped in bytes, without knowing how long the stream is.

Every piece of text draws a priority from a hash of (seed, its number); the sample is the pieces of lowest priority
that fit. That is bottom-k sampling with bytes in place of k: one pass, and never more than the cap in memory.
"""

import hashlib
import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from modicum.store import UserError

# A long document competes in pieces, so that one book cannot push out everything else or be too big to be drawn at all.
PIECE_CHARACTERS = 1 << 16


@dataclass(frozen=True)
class SampleReport:
    """What a tokenizer was trained on, and what came of it.

    documents, bytes: in the sample (a document counts when a piece of it is in); bytes are UTF-8 bytes.
    total_documents, total_bytes: in the whole stream.
    learned_tokens: merges learned. filler_tokens: reserved tokens that fill the vocabulary because the sample holds
    fewer pairs worth merging than there are rows (0 when the text was large enough).
    """

    documents: int
    bytes: int
    total_documents: int
    total_bytes: int
    learned_tokens: int = 0
    filler_tokens: int = 0

    def __str__(self) -> str:
        line = (
            f"sampled {self.bytes:,} of {self.total_bytes:,} bytes "
            f"from {self.documents:,} of {self.total_documents:,} documents; {self.learned_tokens:,} tokens learned"
        )
        if self.filler_tokens:
            line += f"; too little text for more, so {self.filler_tokens:,} reserved tokens fill the vocabulary"
        return line


def sample_texts(texts: Iterable[str], *, sample_bytes: int, seed: int) -> tuple[list[str], SampleReport]:
    """At most `sample_bytes` UTF-8 bytes of `texts`, every piece as likely as any other, in the order of the stream.

    All of them when they fit. The same stream and seed give the same sample. Raises UserError for a lone surrogate.
    """
    kept: list[tuple[int, int, int, str, int]] = []  # (-priority, number, document, piece, its bytes), a heap
    held = total_bytes = number = 0
    limit = 1 << 64  # priorities from here on have been turned away once, and stay so: else small late pieces win
    documents = -1
    piece_characters = max(1, min(PIECE_CHARACTERS, sample_bytes // 16))  # a character is up to four bytes
    for documents, text in enumerate(texts):
        for piece in _pieces(text, piece_characters):
            size = _utf8_size(piece, documents)
            total_bytes += size
            priority = _priority(seed, number)
            number += 1
            if priority >= limit:
                continue
            heapq.heappush(kept, (-priority, number, documents, piece, size))
            held += size
            while held > sample_bytes:
                worst = heapq.heappop(kept)
                limit, held = -worst[0], held - worst[4]
    kept.sort(key=lambda entry: entry[1])
    report = SampleReport(
        documents=len({entry[2] for entry in kept}),
        bytes=held,
        total_documents=documents + 1,
        total_bytes=total_bytes,
    )
    return [entry[3] for entry in kept], report


def _pieces(text: str, most: int) -> Iterator[str]:
    """`text` in pieces of at most `most` characters, cut after a line or a space where there is one."""
    start = 0
    while len(text) - start > most:
        end = start + most
        cut = max(text.rfind("\n", start, end), text.rfind(" ", start, end)) + 1
        yield text[start : (end := cut if cut > start else end)]
        start = end
    yield text[start:]


def _utf8_size(piece: str, document: int) -> int:
    try:
        return len(piece) if piece.isascii() else len(piece.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise UserError(
            f"document {document + 1} of the tokenizer's training text holds a lone surrogate "
            f"(U+{ord(piece[error.start]):04X}), which is no character; remove it from the source"
        ) from None


def _priority(seed: int, number: int) -> int:
    """64 even bits of (seed, number): SHA-256, so that they are the same on every machine and Python."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{number}".encode()).digest()[:8], "big")
