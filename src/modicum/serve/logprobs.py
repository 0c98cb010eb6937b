"""Tokens with their probabilities, in the shapes of the two completion APIs."""

import codecs

from modicum.generate import Chunk
from modicum.serve.responses import Alternative, ChoiceLogprobs, LegacyLogprobs, TokenLogprob
from modicum.tokenizer import Tokenizer

# JSON has no -inf, and OpenAI's API writes this for it.
LOWEST = -9999.0


class TokenLog:
    """The tokens of one answer that are text, as they come. ends: ids that end an answer and are none of its text."""

    def __init__(self, tokenizer: Tokenizer, silent: frozenset[int], *, offset: int = 0) -> None:
        self._tokenizer, self._silent, self._offset = tokenizer, silent, offset
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def entries(self, chunk: Chunk) -> list[TokenLogprob]:
        """One entry for each token of `chunk`, with its alternatives, best first."""
        tops = chunk.top_logprobs or [[] for _ in chunk.ids]
        return [
            {**self._alternative(token, logprob), "top_logprobs": [self._alternative(*pair) for pair in top]}
            for token, logprob, top in zip(chunk.ids, chunk.logprobs, tops, strict=True)
            if token not in self._silent
        ]

    def legacy(self, entries: list[TokenLogprob], *, alternatives: bool) -> LegacyLogprobs:
        """The same in the shape of /v1/completions; offsets are characters from the text's beginning, and those of a
        character's parts are its own."""
        offsets = []
        for entry in entries:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(bytes(entry["bytes"])))
        return {
            "tokens": [_name(entry) for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [{_name(top): top["logprob"] for top in entry["top_logprobs"]} for entry in entries]
            if alternatives
            else None,
            "text_offset": offsets,
        }

    def _alternative(self, token: int, logprob: float) -> Alternative:
        data = self._tokenizer.id_bytes(token) if token < self._tokenizer.vocab_size else b""
        return {"token": data.decode("utf-8", "replace"), "logprob": max(logprob, LOWEST), "bytes": list(data)}


def _name(token: Alternative) -> str:
    """Its text, or as OpenAI's API writes a part of a character, which must differ from other parts: bytes:\\xc3."""
    data = bytes(token["bytes"])
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(entries: list[TokenLogprob]) -> ChoiceLogprobs:
    """The shape of /v1/chat/completions."""
    return {"content": entries, "refusal": None}
