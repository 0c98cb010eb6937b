"""How a chat model answers held-out prompts: whether it stops, says something, at what length, and without repeating.

Greedy, so that the figures are the model's and not the sampler's.
"""

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from modicum.corpus import Conversation
from modicum.evaluate.answers import Exchange, last_exchange
from modicum.generate import Completion, Generator, SamplingParams
from modicum.store import UserError


@dataclass(frozen=True)
class Sample:
    """One prompt (its messages), the answer given, the answer in the data, and why the given one ended."""

    messages: list[dict[str, Any]]
    answer: str
    reference: str
    finish_reason: str


@dataclass(frozen=True)
class AnswerQuality:
    """Shares from 0 to 1 over `prompts` answers of at most max_new_tokens; lengths in tokens, without the end of turn.

    stop_rate: ended by themselves. empty_rate: nothing but white space. median_length_ratio: median over prompts of
    the answer's length by the reference's, which is cut where the answer would have been. repeated_4grams: share of
    4-grams that the same answer had before, and the same of the references so cut. distinct_1, distinct_2: different
    n-grams by all n-grams of all answers (Li et al. 2016). too_long: prompts left out because the context has no room
    for an answer.
    """

    prompts: int
    max_new_tokens: int
    stop_rate: float
    empty_rate: float
    median_length: float
    median_reference_length: float
    median_length_ratio: float
    repeated_4grams: float
    repeated_4grams_reference: float
    distinct_1: float
    distinct_2: float
    too_long: int
    samples: list[Sample]

    def to_dict(self) -> dict[str, Any]:
        """Every figure and the samples, as plain data."""
        return asdict(self)


def answer_quality(
    generator: Generator,
    conversations: Sequence[Conversation],
    *,
    prompts: int = 100,
    max_new_tokens: int = 128,
    samples: int = 10,
    batch_size: int = 16,
    seed: int = 0,
) -> AnswerQuality:
    """Answer the last prompt of at most `prompts` conversations, drawn by the seed; `samples` of them are returned.

    Raises UserError when there is no conversation, or none whose prompt leaves room.
    """
    drawn = random.Random(seed).sample(list(conversations), min(prompts, len(conversations)))
    exchanges = [last_exchange(generator.tokenizer, conversation) for conversation in drawn]
    room = min(max_new_tokens, generator.context // 2)
    kept = [exchange for exchange in exchanges if len(exchange.prompt) + room <= generator.context]
    if not kept:
        raise UserError(
            f"none of {len(exchanges)} held-out prompts leaves room for {room} tokens in the context of "
            f"{generator.context}; lower evaluate.max_new_tokens"
        )
    params = SamplingParams(temperature=0, max_new_tokens=max_new_tokens)
    completions = generator.generate([exchange.prompt for exchange in kept], params, batch_size=batch_size)
    answers = [[i for i in c.ids if i not in generator.stop_ids] for c in completions]
    references = [[i for i in exchange.answer if i not in generator.stop_ids] for exchange in kept]
    limits = [min(max_new_tokens, generator.context - len(exchange.prompt)) for exchange in kept]
    cut = [reference[:limit] for reference, limit in zip(references, limits, strict=True)]
    return AnswerQuality(
        prompts=len(kept),
        max_new_tokens=max_new_tokens,
        stop_rate=sum(c.finish_reason == "stop" for c in completions) / len(kept),
        empty_rate=sum(not c.text.strip() for c in completions) / len(kept),
        median_length=float(median(map(len, answers))),
        median_reference_length=float(median(map(len, references))),
        median_length_ratio=float(median(len(a) / max(len(c), 1) for a, c in zip(answers, cut, strict=True))),
        repeated_4grams=repeated(answers, 4),
        repeated_4grams_reference=repeated(cut, 4),
        distinct_1=distinct(answers, 1),
        distinct_2=distinct(answers, 2),
        too_long=len(exchanges) - len(kept),
        samples=[_sample(exchange, c) for exchange, c in list(zip(kept, completions, strict=True))[:samples]],
    )


def repeated(answers: Sequence[Sequence[int]], n: int) -> float:
    """Share of n-grams that occurred before in the same answer; 0 when no answer is long enough for one."""
    grams = [_grams(answer, n) for answer in answers]
    total = sum(map(len, grams))
    return sum(len(g) - len(set(g)) for g in grams) / total if total else 0.0


def distinct(answers: Sequence[Sequence[int]], n: int) -> float:
    """Different n-grams of all answers by the number of all; 0 when there is none."""
    grams = [gram for answer in answers for gram in _grams(answer, n)]
    return len(set(grams)) / len(grams) if grams else 0.0


def _grams(answer: Sequence[int], n: int) -> list[tuple[int, ...]]:
    return [tuple(answer[i : i + n]) for i in range(len(answer) - n + 1)]


def _sample(exchange: Exchange, completion: Completion) -> Sample:
    messages = exchange.conversation.messages
    last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
    return Sample(messages[:last], completion.text, messages[last]["content"], completion.finish_reason)
