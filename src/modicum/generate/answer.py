"""One answer in the making: what its tokens say, when it ends, and what of it can be given out."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from modicum.generate.params import SamplingParams
from modicum.generate.text import TextStream
from modicum.tokenizer import Tokenizer

FinishReason = Literal["stop", "length", "cancelled"]
Alternatives = list[tuple[int, float]]


@dataclass(frozen=True)
class Completion:
    """One answer. `ids` are all tokens that were sampled, the one that ended it included, `logprobs` (nats, finite)
    theirs under the model's own distribution. `text` has no stop id, no stop string, and of
    control tokens only those that are text of an answer (`Tokenizer.spoken_ids`).

    finish_reason: "stop" when a stop id, a stop string or its grammar ended it, "length" when a limit or the context
    did, "cancelled" when nobody wanted it any more.
    top_logprobs: for each token the most probable ones and their logprobs, best first; empty unless asked for.
    """

    ids: list[int]
    text: str
    finish_reason: FinishReason
    logprobs: list[float]
    top_logprobs: list[Alternatives] = field(default_factory=list)


@dataclass(frozen=True)
class Chunk:
    """A piece of an answer as it comes. The last one, and only it, has a finish_reason; its text may be empty.

    The texts, ids and logprobs of all chunks together are those of the Completion.
    """

    text: str
    ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason | None
    top_logprobs: list[Alternatives] = field(default_factory=list)


class Answer:
    """What was sampled for one prompt, and what was given out of it.

    limit: how many tokens it may have; silent: ids that are no text.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        limit: int,
        stop_ids: frozenset[int],
        tokenizer: Tokenizer,
        silent: frozenset[int],
    ) -> None:
        self.prompt, self.params, self.limit = list(prompt), params, limit
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.top_logprobs: list[Alternatives] = []
        self.finish_reason: FinishReason | None = None if limit else "length"
        self._texts: list[str] = []
        self._given = self._given_texts = 0
        self._stop_ids, self._tokenizer, self._silent = stop_ids, tokenizer, silent
        self._stream = TextStream(params.stop)

    def is_stop(self, token: int) -> bool:
        """Whether this token ends the answer."""
        return token in self._stop_ids

    def take(
        self, token: int, logprob: float, alternatives: Alternatives | None = None, *, complete: bool = False
    ) -> None:
        """One more token: find out whether it ends the answer, and what text is certain now. complete: its grammar
        lets nothing follow, which ends it by itself, also where the limit is reached."""
        before = self.ids[-1] if self.ids else self.prompt[-1]
        self.ids.append(token)
        self.logprobs.append(logprob)
        if alternatives is not None:
            self.top_logprobs.append(alternatives)
        if token in self._stop_ids:
            self.finish("stop")
            return
        if token not in self._silent:
            self._texts.append(self._stream.feed(self._tokenizer.bytes_after(token, before)))
        if self._stream.stopped:
            self.finish_reason = "stop"
        elif complete:
            self.finish("stop")
        elif len(self.ids) == self.limit:
            self.finish("length")

    def finish(self, reason: FinishReason) -> None:
        """It ends here; text that was held back is certain now, and may turn out to hold a stop string."""
        self._texts.append(self._stream.finish())
        self.finish_reason = "stop" if self._stream.stopped else reason

    def chunk(self) -> Chunk | None:
        """What became certain since the last chunk; None when that is nothing and the answer goes on."""
        text = "".join(self._texts[self._given_texts :])
        if not text and self.finish_reason is None:
            return None
        ids, logprobs = self.ids[self._given :], self.logprobs[self._given :]
        piece = Chunk(text, ids, logprobs, self.finish_reason, self.top_logprobs[self._given :])
        self._given, self._given_texts = len(self.ids), len(self._texts)
        return piece

    def completion(self) -> Completion:
        """The finished answer."""
        assert self.finish_reason is not None
        return Completion(self.ids, "".join(self._texts), self.finish_reason, self.logprobs, self.top_logprobs)
