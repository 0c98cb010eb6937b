"""Prompts in, completions out: whole, or as they come."""

import sys
from collections.abc import Generator as Stream
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

import torch
from torch import nn

from modicum.generate.answer import Answer, Chunk, Completion
from modicum.generate.decoding import Decoding, Request
from modicum.generate.params import SamplingParams
from modicum.generate.passes import Runtime
from modicum.model import Decoder
from modicum.store import UserError
from modicum.tokenizer import Tokenizer


class Generator:
    """A model and its tokenizer, ready to answer. Holds no state between calls.

    stop_ids: ids that end every answer; those of a checkpoint, or `[tokenizer.eot_id]` for a base model.
    context: how many tokens prompt and answer may have together, by default as many as the model has positions.
    Control tokens are never sampled, but for those that end an answer or are text of it (`Tokenizer.spoken_ids`), and
    neither are rows of the embedding without a token.
    Raises UserError when the tokenizer has more ids than the model.
    """

    def __init__(
        self, model: Decoder | Runtime, tokenizer: Tokenizer, *, stop_ids: Sequence[int], context: int | None = None
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
        self._silent = frozenset(tokenizer.special_ids - tokenizer.spoken_ids)
        wanted = {tokenizer.eot_id, tokenizer.end_of_turn_id, *tokenizer.spoken_ids, *stop_ids}
        empty = (i for i in range(tokenizer.vocab_size) if not tokenizer.id_bytes(i))
        never = (tokenizer.special_ids - wanted).union(empty, range(tokenizer.vocab_size, rows))
        self.never = torch.tensor(sorted(never), dtype=torch.int64)

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

    def stream(self, prompt: Sequence[int], params: SamplingParams) -> Stream[Chunk, None, None]:
        """The same completion as `generate` gives, in pieces, each as soon as its text is certain.

        Faults of the prompt are raised here, before the first piece. Closing the iterator frees all memory.
        """
        return self._stream(self.answer(prompt, params))

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

    def _stream(self, answer: Answer) -> Stream[Chunk, None, None]:
        with closing(self._decode([answer] if answer.limit else [], 1)) as steps:
            for _ in steps:
                if chunk := answer.chunk():
                    yield chunk
        if not answer.limit:
            yield Chunk("", [], [], answer.finish_reason)

    def _decode(self, answers: Sequence[Answer], slots: int) -> Stream[None, None, None]:
        """Run all answers to their end; yields after every step."""
        if not answers:
            return
        capacity = max(len(answer.prompt) + answer.limit for answer in answers)
        decoding = Decoding(
            self.model, self.never, slots=min(slots, len(answers)), capacity=capacity, compiled=_on_cpu(self.model)
        )
        waiting = iter(answers)
        with evaluation_mode(self.model):
            while True:
                while decoding.free and (answer := next(waiting, None)):
                    decoding.add(Request(answer))
                if not decoding.active:
                    return
                for request in decoding.step():
                    if request.error is not None:
                        raise request.error
                yield


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
