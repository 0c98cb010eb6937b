"""Prompts in, completions out: whole, or as they come."""

from collections.abc import Generator as Stream
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from modicum.generate.batch import Batch
from modicum.generate.params import SamplingParams
from modicum.generate.text import TextStream
from modicum.model import Decoder
from modicum.store import UserError
from modicum.tokenizer import Tokenizer
from modicum.tokenizer.special import TOOL_MARKERS

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Completion:
    """One answer. `ids` are all tokens that were sampled, the one that ended it included, `logprobs` (nats, finite)
    theirs under the model's own distribution. `text` has no stop id, no stop string, and no control token.

    finish_reason: "stop" when a stop id or a stop string ended it, "length" when a limit or the context did.
    """

    ids: list[int]
    text: str
    finish_reason: FinishReason
    logprobs: list[float]


@dataclass(frozen=True)
class Chunk:
    """A piece of an answer as it comes. The last one, and only it, has a finish_reason; its text may be empty.

    The texts, ids and logprobs of all chunks together are those of the Completion.
    """

    text: str
    ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason | None


class Generator:
    """A model and its tokenizer, ready to answer. Holds no state between calls.

    stop_ids: ids that end every answer; those of a checkpoint, or `[tokenizer.eot_id]` for a base model.
    Padding, reserved tokens, the start of a turn, and rows of the embedding without a token are never sampled.
    Raises UserError when the tokenizer has more ids than the model.
    """

    def __init__(self, model: Decoder, tokenizer: Tokenizer, *, stop_ids: Sequence[int]) -> None:
        rows = model.config.vocab_size
        if tokenizer.vocab_size > rows:
            raise UserError(
                f"the tokenizer has {tokenizer.vocab_size} ids and the model's vocabulary {rows}: they are not of one "
                "checkpoint"
            )
        self.model = model
        self.tokenizer = tokenizer
        self.stop_ids = frozenset(stop_ids)
        self._spoken = {i for i in tokenizer.special_ids if tokenizer.id_bytes(i).decode() in TOOL_MARKERS}
        wanted = {tokenizer.eot_id, tokenizer.end_of_turn_id, *self._spoken, *stop_ids}
        empty = (i for i in range(tokenizer.vocab_size) if not tokenizer.id_bytes(i))
        never = (tokenizer.special_ids - wanted).union(empty, range(tokenizer.vocab_size, rows))
        self._never = torch.tensor(sorted(never), dtype=torch.int64)

    @property
    def context(self) -> int:
        """How many tokens prompt and answer may have together."""
        return self.model.config.max_position_embeddings

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        batch_size: int = 16,
    ) -> list[Completion]:
        """A completion for each prompt (token ids), in their order; `params` for all of them, or one each.

        An empty prompt is that of a document's start. Prompts of like length are decoded
        together, batch_size at a time. Raises UserError for an id beyond the vocabulary and for a prompt longer than
        the context.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts, but parameters for {len(each)}")
        answers = [
            self._answer(self._checked(prompt, f"prompt {number}"), p)
            for number, (prompt, p) in enumerate(zip(prompts, each, strict=True), 1)
        ]
        waiting = sorted((answer for answer in answers if answer.limit), key=lambda answer: len(answer.prompt))
        with evaluation_mode(self.model):
            for start in range(0, len(waiting), batch_size):
                for _ in self._decode(waiting[start : start + batch_size]):
                    pass
        return [answer.completion() for answer in answers]

    def stream(self, prompt: Sequence[int], params: SamplingParams) -> Stream[Chunk, None, None]:
        """The same completion as `generate` gives, in pieces, each as soon as its text is certain.

        Faults of the prompt are raised here, before the first piece. Closing the iterator frees all memory.
        """
        return self._stream(self._answer(self._checked(prompt, "prompt"), params))

    def _stream(self, answer: "_Answer") -> Stream[Chunk, None, None]:
        given = texts = 0
        if answer.limit:
            with evaluation_mode(self.model):
                for _ in self._decode([answer]):
                    text = "".join(answer.texts[texts:])
                    if text and not answer.finish_reason:
                        yield Chunk(text, answer.ids[given:], answer.logprobs[given:], None)
                        given, texts = len(answer.ids), len(answer.texts)
        whole = answer.completion()
        yield Chunk("".join(answer.texts[texts:]), whole.ids[given:], whole.logprobs[given:], whole.finish_reason)

    def _decode(self, answers: "list[_Answer]") -> Iterator[None]:
        """Run one batch to its end; yields after every step."""
        batch = Batch(
            self.model,
            [answer.prompt for answer in answers],
            [answer.params for answer in answers],
            [answer.limit for answer in answers],
            self._never,
        )
        while batch.live:
            for number, token, logprob in batch.step():
                answers[number].take(token, logprob)
                if answers[number].finish_reason:
                    batch.retire(number)
            yield

    def _checked(self, prompt: Sequence[int], name: str) -> list[int]:
        ids = list(prompt) or [self.tokenizer.bos_id]
        beyond = next((i for i in ids if not 0 <= i < self.model.config.vocab_size), None)
        if beyond is not None:
            raise UserError(
                f"{name}: token id {beyond} is outside the model's vocabulary of {self.model.config.vocab_size}; "
                "encode the text with this checkpoint's tokenizer"
            )
        if len(ids) > self.context:
            raise UserError(f"{name}: {len(ids)} tokens are more than the context of {self.context}; shorten it")
        return ids

    def _answer(self, prompt: list[int], params: SamplingParams) -> "_Answer":
        limit = min(params.max_new_tokens, self.context - len(prompt))
        return _Answer(prompt, params, limit, self.stop_ids.union(params.stop_ids), self.tokenizer, self._spoken)


class _Answer:
    """One completion in the making."""

    def __init__(
        self,
        prompt: list[int],
        params: SamplingParams,
        limit: int,
        stop_ids: frozenset[int],
        tokenizer: Tokenizer,
        spoken: set[int],
    ) -> None:
        self.prompt, self.params, self.limit = prompt, params, limit
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.texts: list[str] = []
        self.finish_reason: FinishReason | None = None if limit else "length"
        self._stop_ids, self._tokenizer = stop_ids, tokenizer
        self._silent = tokenizer.special_ids - spoken
        self._stream = TextStream(params.stop)

    def take(self, token: int, logprob: float) -> None:
        """One more token: find out whether it ends the answer, and what text is certain now."""
        before = self.ids[-1] if self.ids else self.prompt[-1]
        self.ids.append(token)
        self.logprobs.append(logprob)
        if token in self._stop_ids:
            self.texts.append(self._stream.finish())
            self.finish_reason = "stop"
            return
        if token not in self._silent:
            self.texts.append(self._stream.feed(self._tokenizer.bytes_after(token, before)))
        if len(self.ids) == self.limit:
            self.texts.append(self._stream.finish())
            self.finish_reason = "length"
        if self._stream.stopped:
            self.finish_reason = "stop"

    def completion(self) -> Completion:
        """The finished answer."""
        assert self.finish_reason is not None
        return Completion(self.ids, "".join(self.texts), self.finish_reason, self.logprobs)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Without dropout inside; afterwards the model trains again if it did before."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
