"""The process in which a client's grammar is compiled first: the kernel ends it when it takes too long or too much.

Nothing inside Python can stop a compilation in native code. Run as a program it reads one JSON object (tokens in
base64, special and end ids, the grammar) and prints the fault, or nothing. It imports llguidance and the standard
library alone.
"""

import json
import resource
import sys
from base64 import b64decode
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import llguidance

MEMORY_BYTES = 2 << 30
# Of one answer, at 1 to 2 kB each; llguidance itself would let 250,000 come about.
LEXER_STATES = 50_000


class _Vocabulary:
    """What llguidance asks of a tokenizer. Forced tokens are not used here, so text need not be cut as BPE does."""

    def __init__(self, tokens: Sequence[bytes], special: Sequence[int], ends: Sequence[int]) -> None:
        self.tokens, self.special_token_ids = tokens, list(special)
        self.eos_token_id, self.bos_token_id = ends[0], None
        self._bytes = {token: number for number, token in enumerate(tokens) if len(token) == 1}

    def __call__(self, text: str | bytes) -> list[int]:
        data = text.encode("utf-8") if isinstance(text, str) else text
        return [self._bytes[bytes([byte])] for byte in data if bytes([byte]) in self._bytes]


def vocabulary(tokens: Sequence[bytes], special: Sequence[int], ends: Sequence[int]) -> llguidance.LLTokenizer:
    """tokens: the bytes of each id, b"" for ids that must never be said; as many as the model has logits."""
    wrapped = llguidance.TokenizerWrapper(_Vocabulary(tokens, special, ends))
    return llguidance.LLTokenizer(wrapped, eos_token=list(ends))


def limits() -> llguidance.LLParserLimits:
    """llguidance's own but for the states, which grow with an answer, where no process of its own bounds their memory;
    and without a client's grammar in its messages."""
    return llguidance.LLParserLimits(max_lexer_states=LEXER_STATES, verbose_errors=False)


def _fault(request: dict[str, Any]) -> str:
    tokens = [b64decode(token) for token in request["tokens"]]
    known = vocabulary(tokens, request["special"], request["ends"])
    matcher = llguidance.LLMatcher(known, request["grammar"], limits=limits())
    if not matcher.is_error():
        matcher.compute_bitmask()  # the first mask is the dearest
    return str(matcher.get_error())


if __name__ == "__main__":
    seconds = int(float(sys.argv[1])) + 1
    for kind, limit in ((resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, MEMORY_BYTES)):
        with suppress(ValueError, OSError):  # macOS knows no limit of address space; time still bounds what it can fill
            resource.setrlimit(kind, (limit, limit))
    print(json.dumps(_fault(json.load(sys.stdin))))
