"""Loss on the answers of held-out conversations, with their own prompts and with those of others.

The answer of a conversation is its last assistant turn; the prompt is all before it. The end of the turn is not scored:
a base model was never asked for it, and that one token would speak for the chat model. A model that uses the prompt
loses more when it is another one's; the answers' tokens are the same both times.
"""

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from modicum.corpus import Conversation
from modicum.evaluate.bootstrap import ratio_interval
from modicum.evaluate.scoring import Scored, token_logprobs
from modicum.model import Decoder
from modicum.store import UserError
from modicum.tokenizer import Tokenizer


@dataclass(frozen=True)
class AnswerLoss:
    """nats_per_token: mean over all tokens of all answers, with a 95 % bootstrap interval over conversations (None for
    a single one).

    too_long: conversations, of those that were drawn, left out because they exceed the context. shuffled: whether
    prompts were exchanged.
    """

    nats_per_token: float
    low: float | None
    high: float | None
    tokens: int
    conversations: int
    too_long: int
    shuffled: bool

    def to_dict(self) -> dict[str, Any]:
        """Every figure, as plain data."""
        return asdict(self)


@dataclass(frozen=True)
class Exchange:
    """A prompt's ids, and those of its answer up to and with the end-of-turn token."""

    conversation: Conversation
    prompt: list[int]
    answer: list[int]


def answer_loss(
    model: Decoder,
    tokenizer: Tokenizer,
    conversations: Sequence[Conversation],
    *,
    shuffle: bool = False,
    max_tokens: int | None = None,
    seed: int = 0,
    batch_tokens: int = 8192,
    bfloat16: bool = False,
    bootstrap_samples: int = 1000,
) -> AnswerLoss:
    """Negative log-likelihood of the answers' tokens.

    shuffle: each answer follows the prompt of another conversation, chosen by the seed and never equal to its own; one
    too long for the context loses its beginning. max_tokens: score only conversations of about so many tokens together,
    drawn by the seed. Raises UserError when no conversation fits, or all prompts are equal.
    """
    context = model.config.max_position_embeddings
    kept, too_long = _fitting(tokenizer, conversations, context, max_tokens, seed)
    if not kept:
        raise UserError(f"none of {too_long} held-out conversations fits into the context of {context} tokens")
    prompts = exchange_prompts([e.prompt for e in kept], seed) if shuffle else [e.prompt for e in kept]
    sequences = []
    for prompt, exchange in zip(prompts, kept, strict=True):
        prompt = prompt[-(context + 1 - len(exchange.answer)) :]
        sequences.append(Scored(prompt + _said(exchange.answer, tokenizer), len(prompt)))
    scores = token_logprobs(model, sequences, batch_tokens=batch_tokens, bfloat16=bfloat16)
    nats, tokens = [-float(s.sum()) for s in scores], [len(s) for s in scores]
    low, high = ratio_interval(nats, tokens, samples=bootstrap_samples, seed=seed)
    return AnswerLoss(sum(nats) / sum(tokens), low, high, sum(tokens), len(kept), too_long, shuffle)


def _fitting(
    tokenizer: Tokenizer, conversations: Sequence[Conversation], context: int, max_tokens: int | None, seed: int
) -> tuple[list[Exchange], int]:
    """Those that fit into the context, in their order, and how many of those looked at do not: drawn until there are
    `max_tokens`, or all."""
    drawn: dict[int, Exchange] = {}
    too_long = tokens = 0
    for place in random.Random(seed).sample(range(len(conversations)), len(conversations)):
        exchange = last_exchange(tokenizer, conversations[place])
        size = len(exchange.prompt) + len(exchange.answer)
        if size > context + 1:
            too_long += 1
            continue
        drawn[place] = exchange
        tokens += size
        if max_tokens is not None and tokens >= max_tokens:
            break
    return [drawn[place] for place in sorted(drawn)], too_long


def last_exchange(tokenizer: Tokenizer, conversation: Conversation) -> Exchange:
    """The last assistant turn and what it answers. Raises UserError for a conversation without one."""
    messages = conversation.messages
    last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=None)
    if last is None:
        raise UserError(f"{conversation.origin}: no assistant message")
    prompt = tokenizer.render(messages[:last], add_generation_prompt=True, tools=conversation.tools).ids
    whole = tokenizer.render(messages[: last + 1], tools=conversation.tools)
    if whole.ids[: len(prompt)] != prompt:
        raise UserError("chat.template: a prompt is not the beginning of its answered conversation")
    end = max(i for i, supervised in enumerate(whole.assistant_mask) if supervised) + 1
    return Exchange(conversation, prompt, whole.ids[len(prompt) : end])


def _said(answer: list[int], tokenizer: Tokenizer) -> list[int]:
    """An answer's ids before the one that ends its turn; all of them, where nothing else was said."""
    ends = [place for place, token in enumerate(answer) if token == tokenizer.end_of_turn_id]
    return answer[: ends[-1]] if ends and ends[-1] else answer


def exchange_prompts(prompts: Sequence[list[int]], seed: int) -> list[list[int]]:
    """For each place another one's prompt, never equal to its own: the next different one of a shuffled circle."""
    circle = list(range(len(prompts)))
    random.Random(seed).shuffle(circle)
    if all(prompt == prompts[0] for prompt in prompts):
        raise UserError("the conversations that are measured all have one prompt, so none can be exchanged for another")
    exchanged: list[list[int]] = [[]] * len(prompts)
    for place, own in enumerate(circle):
        others = (prompts[circle[(place + step) % len(circle)]] for step in range(1, len(circle)))
        exchanged[own] = next(other for other in others if other != prompts[own])
    return exchanged
