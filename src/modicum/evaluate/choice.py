"""Multiple choice by likelihood: the choice that the model would rather say, per byte, given the question.

For a chat model the question is a user's turn and the choice the assistant's content (the end of the turn is not
scored: an answer in training is often longer than a choice). For a base model both stand in plain text:
"Question: ...\\nAnswer: ...", after the token that begins a text. The tokens scored are those that the whole has and
the prompt alone has not.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from modicum.corpus import Choice
from modicum.evaluate import baselines
from modicum.evaluate.bootstrap import share_interval
from modicum.evaluate.scoring import Scored, token_logprobs
from modicum.model import Decoder
from modicum.store import UserError
from modicum.tokenizer import Tokenizer

# An item and its credit by log-likelihood per byte and by the plain sum; None where it exceeds the context.
Marked = tuple[Choice, tuple[float, float] | None]


@dataclass(frozen=True)
class ChoiceResult:
    """n items. accuracy by log-likelihood per byte of the choice, with a 95 % interval over items, and beside
    it by the plain sum. chance, majority and word_overlap are what no knowledge scores (see `baselines`).

    All from 0 to 1. too_long: items left out because they exceed the context. per_kind and per_source hold the same
    figures of their items, without further parts.
    """

    n: int
    accuracy: float
    low: float
    high: float
    accuracy_unnormalised: float
    chance: float
    majority: float
    word_overlap: float
    too_long: int
    per_kind: dict[str, "ChoiceResult"] = field(default_factory=dict)
    per_source: dict[str, "ChoiceResult"] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Every figure, as plain data; a part has no empty parts of its own."""
        plain = {name: value for name, value in vars(self).items() if not isinstance(value, dict)}
        for name in ("per_kind", "per_source"):
            parts: dict[str, ChoiceResult] = getattr(self, name)
            if parts:
                plain[name] = {key: part.to_dict() for key, part in parts.items()}
        return plain


def multiple_choice(
    model: Decoder,
    tokenizer: Tokenizer,
    items: Sequence[Choice],
    *,
    chat: bool,
    bootstrap_samples: int = 1000,
    seed: int = 0,
    batch_tokens: int = 8192,
    bfloat16: bool = False,
) -> ChoiceResult:
    """Score every choice of every item. Raises UserError when there are no items, or none that fits the context."""
    if not items:
        raise UserError("no multiple-choice items to evaluate")
    context = model.config.max_position_embeddings
    encode = chat_choice if chat else plain_choice
    encoded = [[encode(tokenizer, item.question, choice) for choice in item.choices] for item in items]
    fits = [all(len(choice.ids) <= context + 1 for choice in choices) for choices in encoded]
    if not any(fits):
        raise UserError(
            f"none of the {len(items)} multiple-choice items fits into the context of {context} tokens; give shorter "
            "ones (evaluate.items)"
        )
    flat = [choice for choices, fit in zip(encoded, fits, strict=True) if fit for choice in choices]
    sums = iter([float(s.sum()) for s in token_logprobs(model, flat, batch_tokens=batch_tokens, bfloat16=bfloat16)])
    pairs = [
        (item, marks(item, [next(sums) for _ in item.choices]) if fit else None)
        for item, fit in zip(items, fits, strict=True)
    ]

    def parts(name_of: Callable[[Choice], str]) -> dict[str, ChoiceResult]:
        groups: dict[str, list[Marked]] = {}
        for pair in pairs:
            groups.setdefault(name_of(pair[0]), []).append(pair)
        scored = {name: group for name, group in sorted(groups.items()) if any(mark for _, mark in group)}
        return {name: _result(group, bootstrap_samples, seed) for name, group in scored.items()}

    return replace(
        _result(pairs, bootstrap_samples, seed),
        per_kind=parts(lambda item: item.kind),
        per_source=parts(lambda item: item.source or "unnamed"),
    )


def chat_choice(tokenizer: Tokenizer, question: str, choice: str) -> Scored:
    """The choice as the assistant's answer to the question; scored without the end of the turn, and without what stands
    before the last control token that a template opens an answer with, as Qwen3's empty thought. Raises UserError for a
    template that writes no answer."""
    turn = [{"role": "user", "content": question}]
    prompt = tokenizer.render(turn, add_generation_prompt=True).ids
    ids = tokenizer.render([*turn, {"role": "assistant", "content": choice}]).ids
    if ids[: len(prompt)] != prompt:
        raise UserError("chat.template: a prompt is not the beginning of its answered conversation")
    control = [i for i in range(len(prompt), len(ids)) if ids[i] in tokenizer.special_ids]
    spans = [span for span in pairwise([len(prompt) - 1, *control, len(ids)]) if span[1] - span[0] > 1]
    if not spans:
        raise UserError("chat.template: it writes nothing of an assistant's answer")
    said = [tokenizer.decode(ids[before + 1 : end]).strip() for before, end in spans]
    alike = [span for span, text in zip(spans, said, strict=True) if text == choice.strip()]
    before, end = alike[0] if alike else max(spans, key=lambda span: span[1] - span[0])
    return Scored(ids[:end], before + 1)


def plain_choice(tokenizer: Tokenizer, question: str, choice: str) -> Scored:
    """The choice in plain text, as a base model reads it."""
    prompt = f"Question: {question.strip()}\nAnswer:"
    before, ids = tokenizer.encode_batch([prompt, f"{prompt} {choice.strip()}"])
    same = next((i for i, (a, b) in enumerate(zip(before, ids, strict=False)) if a != b), len(before))
    return Scored([tokenizer.bos_id, *ids], same + 1)


def marks(item: Choice, sums: list[float]) -> tuple[float, float]:
    """Credit by log-likelihood per byte, and by the plain sum."""
    sizes = [len(choice.strip().encode()) for choice in item.choices]
    per_byte = [total / size for total, size in zip(sums, sizes, strict=True)]
    return baselines.credit(per_byte, item.answer), baselines.credit(sums, item.answer)


def _result(group: list[Marked], samples: int, seed: int) -> ChoiceResult:
    items = [item for item, mark in group if mark is not None]
    marks = [mark for _, mark in group if mark is not None]
    low, high = share_interval([mark for mark, _ in marks], samples=samples, seed=seed)
    commonest, n = baselines.commonest_answer(items), len(items)
    return ChoiceResult(
        n=n,
        accuracy=sum(mark for mark, _ in marks) / n,
        low=low,
        high=high,
        accuracy_unnormalised=sum(mark for _, mark in marks) / n,
        chance=sum(map(baselines.chance, items)) / n,
        majority=sum(baselines.majority(item, commonest) for item in items) / n,
        word_overlap=sum(map(baselines.word_overlap, items)) / n,
        too_long=len(group) - n,
    )
