"""The gate: a model that is written must say what the one it was made from says, or it is not written.

The truth is the float64 reference, run on the source's weights in their own layout; whatever can give logits for ids
(a decoder, a file read back, another runtime) is held against it. Every importer and every writer passes through here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modicum.model import Decoder, ModelConfig
from modicum.model.reference import reference_logits
from modicum.store import UserError

# Of the largest logit: float32 keeps a fixed share of a number, so a model with large logits may differ by more.
TOLERANCE = 1e-4
# One token has nothing to attend to, two have one angle between them, the others are odd and long.
LENGTHS = (1, 2, 7, 40)
LONGEST = 1024

Ids = NDArray[np.int64]
Speaker = Callable[[Ids], Any]


@dataclass(frozen=True)
class Truth:
    """Prompts, and the reference's logits (T, V) float64 for each."""

    prompts: tuple[Ids, ...]
    logits: tuple[NDArray[np.float64], ...]


@dataclass(frozen=True)
class Compared:
    """One prompt of `tokens` ids: the largest difference of a logit, and the largest logit. allowed None: what decides
    is no difference of a logit. how it was given: alone, in a batch, in pieces."""

    tokens: int
    difference: float
    largest: float
    allowed: float | None
    how: str = "alone"

    @property
    def holds(self) -> bool:
        return self.allowed is None or self.difference <= self.allowed  # and so not where it is NaN


def truth_of(weights: Mapping[str, Tensor], config: ModelConfig) -> Truth:
    """What the model of these weights, read in config.rotary_layout, says of a few random prompts; always the same."""
    draw = np.random.default_rng(0)
    lengths = sorted({min(length, config.max_position_embeddings) for length in LENGTHS})
    prompts = tuple(draw.integers(0, config.vocab_size, length, dtype=np.int64) for length in lengths)
    # all in one pass, filled up at the end, so that each layer is widened once
    ids, keep = np.zeros((2, len(prompts), lengths[-1]), dtype=np.int64)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)], keep[row, : len(prompt)] = prompt, 1
    logits = reference_logits(weights, config, ids, attention_mask=keep)
    return Truth(prompts, tuple(logits[row, : len(prompt)] for row, prompt in enumerate(prompts)))


def with_long(truth: Truth, config: ModelConfig, speak: Speaker) -> Truth:
    """And a prompt as long as the context, up to LONGEST, by our decoder: the reference would take minutes over it."""
    length = min(LONGEST, config.max_position_embeddings)
    if length <= max(map(len, truth.prompts)):
        return truth
    prompt: Ids = np.random.default_rng(1).integers(0, config.vocab_size, length, dtype=np.int64)
    return Truth((*truth.prompts, prompt), (*truth.logits, np.asarray(speak(prompt), dtype=np.float64)))


def prove(what: str, speaker: Speaker, truth: Truth, *, tolerance: float | None = TOLERANCE) -> tuple[Compared, ...]:
    """Compare `speaker`, which gives logits (T, V) for ids (T,), with the truth on every prompt.

    Allowed is `tolerance` times the prompt's largest logit; None: whatever it is. Raises UserError
    with the figures where it is exceeded.
    """
    compared = []
    for prompt, wanted in zip(truth.prompts, truth.logits, strict=True):
        found = np.asarray(speaker(prompt), dtype=np.float64)
        largest = float(np.abs(wanted).max())
        difference = float(np.abs(found - wanted).max()) if found.shape == wanted.shape else float("nan")
        compared.append(Compared(len(prompt), difference, largest, None if tolerance is None else tolerance * largest))
    if not all(one.holds for one in compared):
        figures = [
            f"  a prompt of {one.tokens} tokens: logits differ by {one.difference:.3g}, allowed are {one.allowed:.3g} "
            f"({tolerance:g} of the largest, {one.largest:.3g})"
            for one in compared
        ]
        raise UserError("\n".join([f"{what}: does not say what its source says, and was not written", *figures]))
    return tuple(compared)


def decoder_speaker(weights: Mapping[str, Tensor], config: ModelConfig, dtype: torch.dtype = torch.float32) -> Speaker:
    """Our decoder with these weights, computing in `dtype`; those that are of it already are shared, not copied."""
    with torch.device("meta"):
        model = Decoder(config)
    model.load_state_dict({name: weight.to(dtype) for name, weight in weights.items()}, assign=True)
    model.eval()

    def speak(ids: Ids) -> Any:
        with torch.no_grad():
            return model(torch.from_numpy(ids)[None])[0].float().numpy()

    return speak
