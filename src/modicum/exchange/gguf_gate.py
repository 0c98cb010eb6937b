"""The gate of a GGUF file: what llama.cpp makes of it must be what the checkpoint says, or it is not written.

In this order, so that the first thing told is the nearest to the cause: the bytes, the vocabulary, the ids of texts,
the logits. Float32 is held to the largest difference of a logit, what is rounded to the divergence.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from modicum.checkpoint import Checkpoint
from modicum.exchange.causes import likely_cause
from modicum.exchange.continuing import Parted, bits_per_byte, parted
from modicum.exchange.gguf_quality import Limits, Quality, own_texts, quality
from modicum.exchange.gguf_readback import read_back
from modicum.exchange.gguf_runtime import Answer, ask
from modicum.exchange.gguf_texts import UNICODE, agreed_texts
from modicum.exchange.gguf_vocabulary import pre_tokenizer_name, special_ids, spoken_ids
from modicum.exchange.gguf_weights import Quant, file_tensors
from modicum.exchange.gguf_writing import file_metadata
from modicum.exchange.parity import Compared, Ids, decoder_speaker, truth_of, with_long
from modicum.store import UserError

TOLERANCE = 1e-3  # of a logit, for float32 weights
STEPS = 64
_BEGUN = 8
_ROWS = 64


@dataclass(frozen=True)
class Proof:
    """What was compared: keys and tensors of the file; texts, of which characters, with equal ids; logits of prompts;
    the quality on the model's own texts, and of rounded weights on those prompts; greedy continuations, and
    where those that part, part; more_ends: ids at which an answer ends in llama.cpp and goes on in the checkpoint; bits
    per byte of the own texts at full precision and here."""

    keys: int
    tensors: int
    texts: int
    unicode: str
    compared: tuple[Compared, ...]
    quality: Quality
    prompts: Quality | None
    continuations: int
    same_continuations: int
    more_ends: tuple[int, ...]
    parted: tuple[Parted, ...]
    full_bits_per_byte: float
    bits_per_byte: float


def prove_gguf(
    file: Path, name: str, checkpoint: Checkpoint, quant: Quant, limits: Limits, progress: Callable[[str], None]
) -> Proof:
    """Raises UserError, `name` in front, with the cause as well as it can be told."""
    config, weights = checkpoint.config, checkpoint.weights
    progress("reading it back")
    metadata = file_metadata(config, checkpoint.tokenizer, quant)
    keys, tensors = read_back(file, name, config, metadata, file_tensors(weights, config, quant))
    progress("asking llama.cpp")
    speak = decoder_speaker(weights, config)
    truth = with_long(truth_of(weights, config), config, speak)
    own = own_texts(checkpoint)
    steps = min(STEPS, config.max_position_embeddings - 4)
    begun = [text[:4] for text in own[: _BEGUN if steps > 0 else 0]]
    texts = agreed_texts(checkpoint.tokenizer)
    answer = ask(file, name=name, texts=texts, prompts=[*truth.prompts, *own], begun=begun, steps=steps)
    _check_vocabulary(answer, checkpoint, name)
    _check_ids(answer, texts, checkpoint, name)
    said, of_own = answer.logits[: len(truth.prompts)], answer.logits[len(truth.prompts) :]
    compared = tuple(
        _compared(prompt, wanted, found, quant)
        for prompt, wanted, found in zip(truth.prompts, truth.logits, said, strict=True)
    )
    measured = quality(map(speak, own), of_own)
    faults = [
        f"a prompt of {one.tokens} tokens: logits differ by {one.difference:.3g}, allowed are {one.allowed:.3g}"
        for one in compared
        if not one.holds
    ] + measured.faults(limits)
    of_prompts = None if quant == "f32" else quality(_in_parts(truth.logits), _in_parts(said))
    if of_prompts is not None:
        # random tokens leave a model undecided, so that the likeliest token changes where nothing else does
        by_divergence = replace(limits, agreement=0.0)
        faults += [f"on prompts of random tokens: {fault}" for fault in of_prompts.faults(by_divergence)]
    if quant == "f32" and measured.clear_differing:
        faults.append(f"another first choice at {measured.clear_differing} of {measured.clear} clear positions")
    if faults:
        cause = likely_cause(truth, said, weights, config)
        lines = [f"{name}: llama.cpp does not say what the checkpoint says, and it was not written", *faults]
        raise UserError("\n  ".join([*lines, *([f"it is as if {cause}"] if cause else [])]))
    parting = tuple(parted(speak, begun, answer.greedy))
    return Proof(
        keys=keys,
        tensors=tensors,
        texts=len(texts),
        unicode=UNICODE,
        compared=compared,
        quality=measured,
        prompts=of_prompts,
        continuations=len(begun),
        same_continuations=len(begun) - len(parting),
        more_ends=tuple(sorted({*answer.ends} - {*checkpoint.stop_ids})),
        parted=parting,
        full_bits_per_byte=bits_per_byte(checkpoint.tokenizer, own, map(speak, own)),
        bits_per_byte=bits_per_byte(checkpoint.tokenizer, own, of_own),
    )


def _compared(prompt: Ids, wanted: np.ndarray, found: np.ndarray, quant: Quant) -> Compared:
    """Where weights are rounded, the divergence decides, and no difference of one logit."""
    largest = float(np.abs(wanted).max())
    difference = float(np.abs(found - wanted).max()) if found.shape == wanted.shape else float("nan")
    return Compared(len(prompt), difference, largest, TOLERANCE if quant == "f32" else None)


def _in_parts(logits: Iterable[NDArray[np.floating]]) -> Iterator[NDArray[np.floating]]:
    """The same rows, few at a time: a thousand of a large vocabulary would be widened at once."""
    for said in logits:
        yield from (said[at : at + _ROWS] for at in range(0, len(said), _ROWS))


def _check_vocabulary(answer: Answer, checkpoint: Checkpoint, name: str) -> None:
    tokenizer = checkpoint.tokenizer
    wanted = {
        "tokens": checkpoint.config.vocab_size,
        "context": checkpoint.config.max_position_embeddings,
        **special_ids(tokenizer),
        "add_bos": tokenizer.roles.opens is not None,
        "add_eos": tokenizer.roles.closes is not None,
        "template": tokenizer.chat_template,
        "pre": pre_tokenizer_name(tokenizer.definition),
    }
    faults = [
        f"{part}: llama.cpp has {str(getattr(answer, part))[:80]}, the checkpoint {str(value)[:80]}"
        for part, value in wanted.items()
        if getattr(answer, part) != value
    ]
    endless = [number for number in checkpoint.stop_ids if number not in answer.ends]
    if endless:
        faults.append(f"an answer would not end at {', '.join(map(str, endless))}, where the checkpoint ends one")
    if faults:
        raise UserError("\n  ".join([f"{name}: not the checkpoint's vocabulary, and was not written", *faults]))


def _check_ids(answer: Answer, texts: list[str], checkpoint: Checkpoint, name: str) -> None:
    wanted = spoken_ids(checkpoint.tokenizer, texts)
    differing = [(text, a, b) for text, a, b in zip(texts, answer.ids, wanted, strict=True) if a != b]
    if differing:
        text, found, ours = differing[0]
        raise UserError(
            f"{name}: llama.cpp gives other ids to {len(differing)} of {len(texts)} texts, so it was not written. Its "
            f"pre-tokenizer is {answer.pre!r}. The first text: {text[:60]!r}, {found[:12]} there, {ours[:12]} here"
        )
