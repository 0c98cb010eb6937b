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
from modicum.evaluate.divergence import Limits, Quality, quality
from modicum.exchange.causes import likely_cause, place_cause
from modicum.exchange.continuing import Parted, bits_per_byte, parted
from modicum.exchange.gguf_quality import own_texts
from modicum.exchange.gguf_texts import UNICODE, agreed_texts
from modicum.exchange.onnx_prompts import Prompts
from modicum.exchange.onnx_readback import check_ids, read_back
from modicum.exchange.onnx_runtime import OnnxAnswer, ask_onnx
from modicum.exchange.onnx_weights import OnnxQuant
from modicum.exchange.parity import Compared, Ids, Truth, decoder_speaker, truth_of, with_long
from modicum.store import UserError

TOLERANCE, SHARE = 1e-4, 1e-5  # of float32: a logit's difference, or this share of the largest logit if that is more
STEPS = 64
_BEGUN = 8
# What a cache or padding may change, as a share of the largest logit: kernels add up in another order for other shapes,
# and where a number is rounded on its way that may tip it over.
_SHARES: dict[OnnxQuant, float] = {"fp32": SHARE, "fp16": 3e-3, "int8": 1e-2}
LIMITS: dict[OnnxQuant, Limits] = {
    "fp32": Limits(1e-6, 1e-5, 0.99),
    "fp16": Limits(1e-4, 1e-3, 0.995),
    "int8": Limits(2e-3, 2e-2, 0.985),
}


@dataclass(frozen=True)
class OnnxProof:
    """What was compared: weights of the file; texts, of which characters, with equal ids; logits of prompts, beside the
    reference's (alone), or beside those alone; the quality on the model's own texts, their bits per byte at full
    precision and here; on the prompts; greedy continuations of so many steps, and where those that part, part."""

    weights: int
    texts: int
    unicode: str
    compared: tuple[Compared, ...]
    quality: Quality
    full_bits_per_byte: float
    bits_per_byte: float
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
    progress: Callable[[str], None],
) -> tuple[OnnxProof, OnnxAnswer]:
    """Raises UserError, `name` in front, with the cause as well as it can be told."""
    progress("reading it back")
    weights = read_back(folder, file, name, checkpoint, quant)
    texts = agreed_texts(checkpoint.tokenizer)
    check_ids(folder, name, checkpoint, texts)
    progress("asking onnxruntime")
    speak = decoder_speaker(checkpoint.weights, checkpoint.config)
    truth = with_long(truth_of(checkpoint.weights, checkpoint.config), checkpoint.config, speak)
    own = own_texts(checkpoint)
    steps = min(STEPS, checkpoint.config.max_position_embeddings - 4)
    begun = [text[:4] for text in own[: _BEGUN if steps > 0 else 0]]
    prompts = Prompts(truth, own, checkpoint.config.vocab_size)
    answer = ask_onnx(folder / file, name=name, runs=prompts.all, begun=begun, steps=max(steps, 0))
    width = answer.logits[0].shape[-1]
    if width != checkpoint.config.vocab_size:
        raise _refusal(name, [f"it gives logits to {width} tokens, the vocabulary has {checkpoint.config.vocab_size}"])
    said, of_own = prompts.alone(answer.logits), prompts.own(answer.logits)
    compared = [_beside_truth(*one, quant) for one in zip(truth.prompts, truth.logits, said, strict=True)]
    compared += [
        _compared(ids, said[number], found, _SHARES[quant], how)
        for how, number, ids, found in prompts.otherwise(answer.logits)
    ]
    measured = quality(map(speak, own), of_own)
    of_prompts = quality(truth.logits, said)
    faults = [
        f"a prompt of {one.tokens} tokens {one.how}: logits differ by {one.difference:.3g}, allowed {one.allowed:.3g}"
        for one in compared
        if not one.holds
    ] + measured.faults(limits)
    # random tokens leave a model undecided, so that the likeliest token changes where nothing else does
    faults += [f"on prompts of random tokens: {fault}" for fault in of_prompts.faults(replace(limits, agreement=0.0))]
    parting = parted(speak, begun, answer.greedy)
    if quant == "fp32":
        faults += [f"a continuation parts at step {one.step}, by {one.margin:.3g}" for one in parting if not one.near]
        if measured.clear_differing:
            faults.append(f"another first choice at {measured.clear_differing} of {measured.clear} clear positions")
    if faults:
        cause = _sees_later(prompts, answer, quant) or _cause(compared, prompts, truth, said, answer.logits, checkpoint)
        raise _refusal(name, [*faults, *([f"it is as if {cause}"] if cause else [])])
    proof = OnnxProof(
        weights=weights,
        texts=len(texts),
        unicode=UNICODE,
        compared=tuple(compared),
        quality=measured,
        full_bits_per_byte=bits_per_byte(checkpoint.tokenizer, own, map(speak, own)),
        bits_per_byte=bits_per_byte(checkpoint.tokenizer, own, of_own),
        prompts=of_prompts,
        continuations=len(begun),
        steps=max(steps, 0),
        parted=tuple(parting),
    )
    return proof, answer


def _refusal(name: str, faults: list[str]) -> UserError:
    heading = f"{name}: onnxruntime does not say what the checkpoint says, and it was not written"
    return UserError("\n  ".join([heading, *faults]))


def _sees_later(prompts: Prompts, answer: OnnxAnswer, quant: OnnxQuant) -> str | None:
    off, largest = prompts.moved_before(answer.logits)
    if off <= max(TOLERANCE, _SHARES[quant] * largest):
        return None
    return f"the causal mask were missing: another last token changes the logits before it by {off:.3g}"


def _beside_truth(prompt: Ids, wanted: NDArray[np.float64], found: NDArray[np.float32], quant: OnnxQuant) -> Compared:
    """Where weights are rounded, the divergence decides, and no difference of one logit."""
    one = _compared(prompt, wanted, found, SHARE, "alone")
    return one if quant == "fp32" else replace(one, allowed=None)


def _compared(prompt: Ids, wanted: np.ndarray, found: np.ndarray, share: float, how: str) -> Compared:
    largest = float(np.abs(wanted).max())
    return Compared(len(prompt), float(np.abs(found - wanted).max()), largest, max(TOLERANCE, share * largest), how)


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
