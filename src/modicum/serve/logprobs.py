"""Tokens with their probabilities, in the shapes of the two completion APIs."""

from modicum.generate import Chunk
from modicum.serve.responses import Alternative, ChoiceLogprobs, LegacyLogprobs, TokenLogprob
from modicum.tokenizer import Tokenizer

# JSON has no -inf, and OpenAI's API writes this for it.
LOWEST = -9999.0


class TokenLog:
    """The tokens of one answer that are text, as they come. ends: ids that end an answer and are none of its text."""

    def __init__(self, tokenizer: Tokenizer, silent: frozenset[int], *, offset: int = 0) -> None:
        self._tokenizer, self._silent, self._offset = tokenizer, silent, offset

    def entries(self, chunk: Chunk) -> list[TokenLogprob]:
        """One entry for each token of `chunk`, with its alternatives, best first."""
        tops = chunk.top_logprobs or [[] for _ in chunk.ids]
        return [
            {**self._alternative(token, logprob), "top_logprobs": [self._alternative(*pair) for pair in top]}
            for token, logprob, top in zip(chunk.ids, chunk.logprobs, tops, strict=True)
            if token not in self._silent
        ]

    def legacy(self, entries: list[TokenLogprob], *, alternatives: bool) -> LegacyLogprobs:
        """The same in the shape of /v1/completions; offsets are characters from the text's beginning."""
        offsets = []
        for entry in entries:
            offsets.append(self._offset)
            self._offset += len(entry["token"])
        return {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [{top["token"]: top["logprob"] for top in entry["top_logprobs"]} for entry in entries]
            if alternatives
            else None,
            "text_offset": offsets,
        }

    def _alternative(self, token: int, logprob: float) -> Alternative:
        data = self._tokenizer.id_bytes(token) if token < self._tokenizer.vocab_size else b""
        return {"token": data.decode("utf-8", "replace"), "logprob": max(logprob, LOWEST), "bytes": list(data)}


def chat_logprobs(entries: list[TokenLogprob]) -> ChoiceLogprobs:
    """The shape of /v1/chat/completions."""
    return {"content": entries, "refusal": None}
