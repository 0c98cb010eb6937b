"""What one request asks of the sampler, checked once, at the door."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from modicum.model.values import LARGEST_SIZE, as_float, shown
from modicum.store import UserError

# So many are found in one pass over the logits, and no client is known to ask for more than 20.
MOST_ALTERNATIVES = 64


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one completion are chosen. The defaults sample from the model's own distribution.

    max_new_tokens: at most so many tokens; clamped to the room that the prompt leaves in the context. 0 gives none.
    temperature: divides the logits; 0 takes the most probable token (the lowest id among equals).
    top_k: only the k most probable tokens; 0, or as many as the vocabulary has, keeps all.
    top_p: the smallest set of most probable tokens whose mass reaches p (Holtzman et al. 2020); 1 keeps all, 0 one.
    min_p: only tokens at least min_p times as probable as the best (Nguyen et al. 2024); 0 keeps all.
    repetition_penalty: a positive logit of a token that the prompt or the answer already holds is divided by it, a
        negative one multiplied (Keskar et al. 2019, CTRL); 1 changes nothing.
    frequency_penalty, presence_penalty: taken from the logit of a token for each time, and once, that the answer (not
        the prompt) already holds it, as OpenAI's API has them; from -2 to 2, 0 changes nothing.
    logit_bias: added to the logits of these ids. Ids that are never sampled stay so.
    top_logprobs: report for each token of the answer so many most probable ones, at most 64.
    seed: of this request alone. The same request gives the same tokens whatever shares its batch.
    stop: the answer ends before the first of these strings, which is never part of the text.
    stop_ids: token ids that end the answer, beside those of the generator.

    They apply in the order penalties, bias, temperature, top_k, top_p, min_p. Raises UserError naming every
    field at fault.
    """

    max_new_tokens: int = 256
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    top_logprobs: int = 0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        faults = [
            _whole("max_new_tokens", self.max_new_tokens),
            _between("temperature", self.temperature, 0, math.inf),
            _whole("top_k", self.top_k),
            _between("top_p", self.top_p, 0, 1),
            _between("min_p", self.min_p, 0, 1),
            # beyond these bounds a float32 logit can overflow, and no use for them is known
            _between("repetition_penalty", self.repetition_penalty, 0.01, 100),
            _between("frequency_penalty", self.frequency_penalty, -2, 2),
            _between("presence_penalty", self.presence_penalty, -2, 2),
            _biases("logit_bias", self.logit_bias),
            _whole("top_logprobs", self.top_logprobs, MOST_ALTERNATIVES),
            _whole("seed", self.seed),
            _strings("stop", self.stop),
            _ids("stop_ids", self.stop_ids),
        ]
        found = [fault for fault in faults if fault]
        if found:
            raise UserError("\n".join(found))
        # whole numbers may be larger than those that a tensor holds
        object.__setattr__(self, "temperature", float(self.temperature))
        object.__setattr__(self, "top_k", min(self.top_k, LARGEST_SIZE))
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_ids", tuple(self.stop_ids))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))

    @property
    def greedy(self) -> bool:
        """Whether only one token is ever possible, so that no random number is needed."""
        return self.temperature == 0 or self.top_k == 1 or self.top_p == 0

    @property
    def shapes_logits(self) -> bool:
        """Whether anything but the filters stands between the model's logits and the choice."""
        penalized = self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0
        return penalized or bool(self.logit_bias)


def _whole(name: str, value: Any, most: int | None = None) -> str | None:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0 and (most is None or value <= most):
        return None
    wanted = "of at least 0" if most is None else f"from 0 to {most}"
    return f"{name}: expected a whole number {wanted}, found {shown(value)}"


def _between(name: str, value: Any, low: float, high: float) -> str | None:
    number = as_float(value)
    if math.isfinite(number) and low <= number <= high:
        return None
    wanted = f"a finite number of at least {low:g}" if high == math.inf else f"a number from {low:g} to {high:g}"
    return f"{name}: expected {wanted}, found {shown(value)}"


def _strings(name: str, value: Any) -> str | None:
    if isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(s, str) and s for s in value):
        return None
    return f"{name}: expected a list of strings, none of them empty, found {shown(value)}"


def _ids(name: str, value: Any) -> str | None:
    if isinstance(value, Sequence) and not isinstance(value, str) and not any(_whole(name, i) for i in value):
        return None
    return f"{name}: expected a list of token ids, found {shown(value)}"


def _biases(name: str, value: Any) -> str | None:
    # a float32 logit stays finite, whatever the model says
    if isinstance(value, Mapping) and not any(
        _whole(name, i) or _between(name, bias, -1e6, 1e6) for i, bias in value.items()
    ):
        return None
    return f"{name}: expected token ids and what to add to their logits, each from -1e6 to 1e6, found {shown(value)}"
