"""The gate of an ONNX model: what onnxruntime makes of the folder must be what the checkpoint says.

In this order, so that the first thing told is the nearest to the cause: the bytes, the ids of texts, the width, whether
later tokens are seen, the logits, and whether a cache or padding changes them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from modicum.checkpoint import Checkpoint
from modicum.evaluate.beside import Judged, judged
from modicum.evaluate.divergence import LOOSEN, Limits, Quality, quality
from modicum.evaluate.texts import judging_texts
from modicum.exchange.causes import likely_cause, place_cause
from modicum.exchange.continuing import Parted, parted
from modicum.exchange.onnx_prompts import Prompts
from modicum.exchange.onnx_readback import read_back
from modicum.exchange.onnx_runtime import OnnxAnswer, ask_onnx
from modicum.exchange.onnx_weights import OnnxQuant
from modicum.exchange.parity import Compared, Ids, Truth, decoder_speaker, truth_of, with_long
from modicum.exchange.scope import Scope
from modicum.exchange.strings import UNICODE, agreed_strings, check_tokenizer
from modicum.store import UserError

_BEGIN = 4  # tokens of a text that is continued
# What a cache or padding may change, as a share of the largest logit: kernels add up in another order for other shapes,
# and where a number is rounded on its way that may tip it over. Below the least it is rounding in any case.
_SHARES: dict[OnnxQuant, float] = {"fp32": 1e-5, "fp16": 3e-3, "int8": 1e-2}
_LEAST = 1e-4
LIMITS: dict[OnnxQuant, Limits] = {
    "fp32": Limits(1e-6, 1e-5, 0.99, logit=1e-4),
    "fp16": Limits(1e-4, 1e-3, 0.995),
    "int8": Limits(2e-3, 2e-2, 0.985),
}


@dataclass(frozen=True)
class OnnxProof:
    """What was compared: weights of the file; strings, of which characters, with equal ids; logits of prompts, beside
    the reference's (alone), or beside those alone; judged: what it says of texts beside full precision; the same of the
    prompts; greedy continuations of so many steps, and where those that part, part."""

    weights: int
    strings: int
    unicode: str
    compared: tuple[Compared, ...]
    judged: Judged
    prompts: Quality
    continuations: int
    steps: int
    parted: tuple[Parted, ...]


def prove_onnx(
    folder: Path,
    file: str,
    name: str,
    checkpoint: Checkpoint,
    quant: OnnxQuant,
    limits: Limits,
    scope: Scope,
    progress: Callable[[str], None],
    work: Path,
) -> OnnxProof:
    """Raises UserError, `name` in front, with the cause as well as it can be told. work: a folder for passing files."""
    progress("reading it back")
    weights = read_back(folder, file, name, checkpoint, quant)
    strings = agreed_strings(checkpoint.tokenizer, scope.strings)
    check_tokenizer(folder, name, checkpoint.tokenizer, strings)
    texts = judging_texts(checkpoint, scope.heldout, texts=scope.texts, tokens=scope.tokens)
    progress(f"asking onnxruntime, and judging by {texts.source}")
    speak = decoder_speaker(checkpoint.weights, checkpoint.config)
    truth = with_long(truth_of(checkpoint.weights, checkpoint.config), checkpoint.config, speak)
    steps = max(0, min(scope.steps, checkpoint.config.max_position_embeddings - _BEGIN))
    begun = [row[:_BEGIN] for row in texts.rows[: scope.continuations if steps else 0]]
    prompts = Prompts(truth, texts.rows, checkpoint.config.vocab_size)
    answer = ask_onnx(folder / file, name=name, runs=prompts.all, begun=begun, steps=steps, work=work)
    width = answer.logits[0].shape[-1]
    if width != checkpoint.config.vocab_size:
        raise _refusal(name, [f"it gives logits to {width} tokens, the vocabulary has {checkpoint.config.vocab_size}"])
    said, of_texts = prompts.alone(answer.logits), prompts.texts(answer.logits)
    compared = []
    for prompt, wanted, given in zip(truth.prompts, truth.logits, said, strict=True):
        # where weights are rounded, the divergence decides, and no difference of one logit
        compared.append(replace(_compared(prompt, wanted, given, "alone", quant, limits), allowed=limits.logit))
    compared += [
        _compared(ids, said[number], given, how, quant, limits)
        for how, number, ids, given in prompts.otherwise(answer.logits)
    ]
    found = judged(texts, checkpoint.tokenizer, map(speak, texts.rows), of_texts, clear=limits.clear)
    of_prompts = quality(truth.logits, said)
    option = "" if limits.logit is None else " (--max-difference)"
    faults = [
        f"a prompt of {one.tokens} tokens {one.how}: logits differ by {one.difference:.3g}, allowed {one.allowed:.3g}"
        f"{option}"
        for one in compared
        if not one.holds
    ] + found.quality.faults(limits)
    # random tokens leave a model undecided, so that the likeliest token changes where nothing else does
    faults += [f"on prompts of random tokens: {fault}" for fault in of_prompts.faults(replace(limits, agreement=0.0))]
    parting = parted(speak, begun, answer.greedy, clear=limits.clear)
    if limits.logit is not None:
        faults += found.quality.other_choices()
        faults += [f"a continuation parts at step {one.step}, by {one.margin:.3g}" for one in parting if not one.near]
    if faults:
        cause = _sees_later(prompts, answer, quant, limits)
        cause = cause or _cause(compared, prompts, truth, said, answer.logits, checkpoint)
        more = [f"it is as if {cause}"] if cause else [] if limits.logit is not None else [LOOSEN]
        raise _refusal(name, [*faults, *more])
    return OnnxProof(
        weights=weights,
        strings=len(strings),
        unicode=UNICODE,
        compared=tuple(compared),
        judged=found,
        prompts=of_prompts,
        continuations=len(begun),
        steps=steps,
        parted=parting,
    )


def _refusal(name: str, faults: list[str]) -> UserError:
    heading = f"{name}: onnxruntime does not say what the checkpoint says, and it was not written"
    return UserError("\n  ".join([heading, *faults]))


def _sees_later(prompts: Prompts, answer: OnnxAnswer, quant: OnnxQuant, limits: Limits) -> str | None:
    off, largest = prompts.moved_before(answer.logits)
    if off <= max(_LEAST, _allowed(largest, quant, limits)):
        return None
    return f"the causal mask were missing: another last token changes the logits before it by {off:.3g}"


def _compared(
    prompt: Ids, wanted: np.ndarray, found: np.ndarray, how: str, quant: OnnxQuant, limits: Limits
) -> Compared:
    largest = float(np.abs(wanted).max())
    return Compared(len(prompt), float(np.abs(found - wanted).max()), largest, _allowed(largest, quant, limits), how)


def _allowed(largest: float, quant: OnnxQuant, limits: Limits) -> float:
    """What a cache, padding or a later token may change of a logit, when the largest is `largest`."""
    return max(_LEAST, _SHARES[quant] * largest) if limits.logit is None else limits.logit


def _cause(
    compared: list[Compared],
    prompts: Prompts,
    truth: Truth,
    said: list[NDArray[np.float32]],
    logits: list[NDArray[np.float32]],
    checkpoint: Checkpoint,
) -> str | None:
    """Of what differs only with a cache: places or cache; only in a batch: the mask; else what conversions have."""
    failing = {one.how for one in compared if not one.holds}
    if failing == {"with a cache"}:
        wanted = prompts.prompts[prompts.pieces], said[prompts.pieces], prompts.in_pieces(logits)
        return place_cause(*wanted, prompts.cuts, checkpoint) or "the cache held other keys or values than were put in"
    if failing and not failing & {"alone", "with a cache"}:
        return "padding were seen"
    return likely_cause(truth, said, checkpoint.weights, checkpoint.config)
