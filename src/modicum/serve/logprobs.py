"""Tokens with their probabilities, in the shapes of the two completion APIs."""

import codecs

from modicum.generate import Chunk
from modicum.serve.responses import Alternative, ChoiceLogprobs, LegacyLogprobs, TokenLogprob
from modicum.tokenizer import Tokenizer

# JSON has no -inf, and OpenAI's API writes this for it.
LOWEST = -9999.0


class TokenLog:
    """The tokens of one answer that are text, each as soon as some of its text is given out: those of a stop string
    never are. silent: ids that are no text. before: the prompt's last id."""

    def __init__(self, tokenizer: Tokenizer, silent: frozenset[int], before: int) -> None:
        self._tokenizer, self._silent, self._before = tokenizer, silent, before
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        # what is not given out yet, and where its text begins; characters that are said, and that are given out
        self._held: list[tuple[int, TokenLogprob]] = []
        self._said = self._given = 0

    def entries(self, chunk: Chunk) -> list[TokenLogprob]:
        """One entry for each token that is known with `chunk`, with its alternatives, best first."""
        return [entry for _, entry in self._known(chunk)]

    def legacy(self, chunk: Chunk, *, alternatives: bool) -> LegacyLogprobs:
        """The same in the shape of /v1/completions; offsets are characters from the text's beginning, and those of a
        character's parts are its own."""
        known = self._known(chunk)
        return {
            "tokens": [_name(entry) for _, entry in known],
            "token_logprobs": [entry["logprob"] for _, entry in known],
            "top_logprobs": [{_name(top): top["logprob"] for top in entry["top_logprobs"]} for _, entry in known]
            if alternatives
            else None,
            "text_offset": [offset for offset, _ in known],
        }

    def _known(self, chunk: Chunk) -> list[tuple[int, TokenLogprob]]:
        tops = chunk.top_logprobs or [[] for _ in chunk.ids]
        for token, logprob, top in zip(chunk.ids, chunk.logprobs, tops, strict=True):
            before, self._before = self._before, token
            if token in self._silent:
                continue
            alternatives = [self._alternative(*pair) for pair in top]
            self._held.append((self._said, {**self._alternative(token, logprob), "top_logprobs": alternatives}))
            self._said += len(self._decoder.decode(self._tokenizer.bytes_after(token, before)))
        self._given += len(chunk.text)
        if chunk.finish_reason is not None and self._said <= self._given:  # else a stop string ended it
            count = len(self._held)
        else:
            count = sum(begins < self._given for begins, _ in self._held)
        known, self._held = self._held[:count], self._held[count:]
        return known

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
