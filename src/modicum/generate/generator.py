"""Prompts in, completions out: whole, or as they come."""

import sys
from collections.abc import Generator as Stream
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

import torch
from torch import nn

from modicum.checkpoint import opening_of
from modicum.generate.answer import Answer, Chunk, Completion
from modicum.generate.decoding import Decoding, Request
from modicum.generate.params import SamplingParams
from modicum.generate.passes import Runtime
from modicum.model import Decoder
from modicum.store import UserError
from modicum.tokenizer import Tokenizer


class Kept:
    """What was computed for one conversation, between two calls of `Generator.stream`; nothing at first.

    `decoding` is missing while an answer is made, and after one that did not come to its end.
    """

    def __init__(self) -> None:
        self.decoding: Decoding | None = None

    def take(self, capacity: int) -> Decoding | None:
        """What is there, where it has room for so many tokens."""
        decoding, self.decoding = self.decoding, None
        return decoding if decoding is not None and decoding.capacity >= capacity else None


class Generator:
    """A model and its tokenizer, ready to answer. Holds no state between calls.

    stop_ids: ids that end every answer; those of a checkpoint, or `[tokenizer.eot_id]` for a base model.
    opening: ids that stand before a text to go on from; those of a checkpoint, by default `opening_of(tokenizer)`.
    context: how many tokens prompt and answer may have together, by default as many as the model has positions.
    Control tokens are never sampled, but for those that end an answer or are text of it (`Tokenizer.spoken_ids`), and
    neither are rows of the embedding without a token.
    Raises UserError when the tokenizer has more ids than the model.
    """

    def __init__(
        self,
        model: Decoder | Runtime,
        tokenizer: Tokenizer,
        *,
        stop_ids: Sequence[int],
        opening: Sequence[int] | None = None,
        context: int | None = None,
    ) -> None:
        rows = model.config.vocab_size
        if tokenizer.vocab_size > rows:
            raise UserError(
                f"the tokenizer has {tokenizer.vocab_size} ids and the model's vocabulary {rows}: they are not of one "
                "checkpoint"
            )
        self.context = min(context or sys.maxsize, model.config.max_position_embeddings)
        self.model = model
        self.tokenizer = tokenizer
        self.stop_ids = frozenset(stop_ids)
        self._opening = list(opening_of(tokenizer) if opening is None else opening)
        self._silent = frozenset(tokenizer.special_ids - tokenizer.spoken_ids)
        wanted = {tokenizer.eot_id, tokenizer.end_of_turn_id, *tokenizer.spoken_ids, *stop_ids}
        empty = (i for i in range(tokenizer.vocab_size) if not tokenizer.id_bytes(i))
        never = (tokenizer.special_ids - wanted).union(empty, range(tokenizer.vocab_size, rows))
        self.never = torch.tensor(sorted(never), dtype=torch.int64)

    def text_prompt(self, text: str) -> list[int]:
        """The ids of a text to go on from, at least one: an empty one is a document's start."""
        return [*self._opening, *self.tokenizer.encode(text)] or [self.tokenizer.bos_id]

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        batch_size: int = 16,
    ) -> list[Completion]:
        """A completion for each prompt (token ids), in their order; `params` for all of them, or one each.

        An empty prompt is that of a document's start. At most batch_size prompts are decoded together; when one ends,
        the next takes its place. Raises UserError for an id beyond the vocabulary and for a prompt longer than the
        context.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts, but parameters for {len(each)}")
        answers = [
            self.answer(prompt, p, name=f"prompt {number}")
            for number, (prompt, p) in enumerate(zip(prompts, each, strict=True), 1)
        ]
        for _ in self._decode([answer for answer in answers if answer.limit], batch_size):
            pass
        return [answer.completion() for answer in answers]

    def stream(
        self, prompt: Sequence[int], params: SamplingParams, *, kept: Kept | None = None
    ) -> Stream[Chunk, None, None]:
        """The same completion as `generate` gives, in pieces, each as soon as its text is certain.

        kept: of the call before with the same one; what this prompt begins with and that one held is not computed
        again. Faults of the prompt are raised here, before the first piece. Closing the iterator frees all memory.
        """
        return self._stream(self.answer(prompt, params), kept)

    def answer(
        self, prompt: Sequence[int], params: SamplingParams, *, name: str = "prompt", context: int | None = None
    ) -> Answer:
        """An answer without tokens yet. Raises UserError where the prompt or a biased id is not the model's."""
        context = self.context if context is None else context
        vocabulary = self.model.config.vocab_size
        ids = list(prompt) or [self.tokenizer.bos_id]
        beyond = next((i for i in ids if not 0 <= i < vocabulary), None)
        if beyond is not None:
            raise UserError(
                f"{name}: token id {beyond} is outside the model's vocabulary of {vocabulary}; "
                "encode the text with this checkpoint's tokenizer"
            )
        if len(ids) > context:
            raise UserError(f"{name}: {len(ids)} tokens are more than the context of {context}; shorten it")
        biased = next((i for i in params.logit_bias if i >= vocabulary), None)
        if biased is not None:
            raise UserError(f"logit_bias: token id {biased} is outside the model's vocabulary of {vocabulary}")
        limit = min(params.max_new_tokens, context - len(ids))
        return Answer(ids, params, limit, self.stop_ids.union(params.stop_ids), self.tokenizer, self._silent)

    def _stream(self, answer: Answer, kept: Kept | None) -> Stream[Chunk, None, None]:
        with closing(self._decode([answer] if answer.limit else [], 1, kept)) as steps:
            for _ in steps:
                if chunk := answer.chunk():
                    yield chunk
        if not answer.limit:
            yield Chunk("", [], [], answer.finish_reason)

    def _decode(self, answers: Sequence[Answer], slots: int, kept: Kept | None = None) -> Stream[None, None, None]:
        """Run all answers to their end; yields after every step."""
        if not answers:
            return
        capacity = max(len(answer.prompt) + answer.limit for answer in answers)
        decoding = None if kept is None else kept.take(capacity)
        if decoding is None:
            decoding = Decoding(
                self.model,
                self.never,
                slots=min(slots, len(answers)),
                capacity=capacity if kept is None else min(2 * capacity, self.context),  # a conversation grows
                keep=kept is not None,
                compiled=_on_cpu(self.model),
            )
        waiting = iter(answers)
        with evaluation_mode(self.model):
            while True:
                while decoding.free and (answer := next(waiting, None)):
                    decoding.add(Request(answer))
                if not decoding.active:
                    break
                for request in decoding.step():
                    if request.error is not None:
                        raise request.error
                yield
        if kept is not None:
            kept.decoding = decoding


def _on_cpu(model: Decoder | Runtime) -> bool:
    """There the kernels of decoding, once made, are there in no time; torch.compile would outlast a single answer."""
    return isinstance(model, Decoder) and model.model.norm.weight.device.type == "cpu"


@contextmanager
def evaluation_mode(model: nn.Module | Runtime) -> Iterator[None]:
    """Without dropout inside; afterwards the model trains again if it did before. Another runtime knows no training."""
    if not isinstance(model, nn.Module):
        yield
        return
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
