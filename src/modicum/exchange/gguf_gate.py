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
from modicum.evaluate.beside import Judged, judged
from modicum.evaluate.divergence import LOOSEN, Limits, Quality, quality
from modicum.evaluate.texts import judging_texts
from modicum.exchange.causes import likely_cause
from modicum.exchange.continuing import Parted, parted
from modicum.exchange.gguf_readback import read_back
from modicum.exchange.gguf_runtime import Answer, ask
from modicum.exchange.gguf_vocabulary import pre_tokenizer_name, special_ids, spoken_ids
from modicum.exchange.gguf_weights import Quant, file_tensors
from modicum.exchange.gguf_writing import file_metadata
from modicum.exchange.parity import Compared, Ids, decoder_speaker, truth_of, with_long
from modicum.exchange.scope import Scope
from modicum.exchange.strings import UNICODE, agreed_strings
from modicum.store import UserError

LIMITS: dict[Quant, Limits] = {
    "f32": Limits(1e-6, 1e-5, 0.99, logit=1e-3),
    "f16": Limits(1e-4, 1e-3, 0.995),
    "bf16": Limits(1e-3, 1e-2, 0.985),
    "q8_0": Limits(2e-3, 2e-2, 0.985),
    "q6_k": Limits(5e-3, 5e-2, 0.97),
    "q5_k": Limits(1e-2, 1e-1, 0.95),
    "q4_k": Limits(3e-2, 3e-1, 0.93),
    "q4_0": Limits(3e-2, 3e-1, 0.93),
}
_BEGIN = 4  # tokens of a text that is continued
_ROWS = 64


@dataclass(frozen=True)
class Proof:
    """What was compared: keys and tensors of the file; strings, of which characters, with equal ids; logits of prompts;
    judged: what it says of texts beside full precision; of rounded weights also on those prompts; greedy continuations
    of so many steps, and where those that part, part; more_ends: ids at which an answer ends in llama.cpp and goes on
    in the checkpoint."""

    keys: int
    tensors: int
    strings: int
    unicode: str
    compared: tuple[Compared, ...]
    judged: Judged
    prompts: Quality | None
    continuations: int
    steps: int
    parted: tuple[Parted, ...]
    more_ends: tuple[int, ...]


def prove_gguf(
    file: Path,
    name: str,
    checkpoint: Checkpoint,
    quant: Quant,
    limits: Limits,
    scope: Scope,
    progress: Callable[[str], None],
    work: Path,
) -> Proof:
    """Raises UserError, `name` in front, with the cause as well as it can be told. work: a folder for passing files."""
    config, weights = checkpoint.config, checkpoint.weights
    progress("reading it back")
    metadata = file_metadata(config, checkpoint.tokenizer, quant)
    keys, tensors = read_back(file, name, config, metadata, file_tensors(weights, config, quant, work))
    texts = judging_texts(checkpoint, scope.heldout, texts=scope.texts, tokens=scope.tokens)
    progress(f"asking llama.cpp, and judging by {texts.source}")
    speak = decoder_speaker(weights, config)
    truth = with_long(truth_of(weights, config), config, speak)
    steps = max(0, min(scope.steps, config.max_position_embeddings - _BEGIN))
    begun = [row[:_BEGIN] for row in texts.rows[: scope.continuations if steps else 0]]
    strings = agreed_strings(checkpoint.tokenizer, scope.strings, composed=True)
    prompts = [*truth.prompts, *texts.rows]
    answer = ask(file, name=name, texts=strings, prompts=prompts, begun=begun, steps=steps, work=work)
    _check_vocabulary(answer, checkpoint, name)
    _check_ids(answer, strings, checkpoint, name)
    said, of_texts = answer.logits[: len(truth.prompts)], answer.logits[len(truth.prompts) :]
    compared = tuple(
        _compared(prompt, wanted, found, limits.logit)
        for prompt, wanted, found in zip(truth.prompts, truth.logits, said, strict=True)
    )
    found = judged(texts, checkpoint.tokenizer, map(speak, texts.rows), of_texts, clear=limits.clear)
    faults = [
        f"a prompt of {one.tokens} tokens: logits differ by {one.difference:.3g}, allowed are {one.allowed:.3g} "
        "(--max-difference)"
        for one in compared
        if not one.holds
    ] + found.quality.faults(limits)
    of_prompts = None if limits.logit is not None else quality(_in_parts(truth.logits), _in_parts(said))
    if of_prompts is not None:
        # random tokens leave a model undecided, so that the likeliest token changes where nothing else does
        by_divergence = replace(limits, agreement=0.0)
        faults += [f"on prompts of random tokens: {fault}" for fault in of_prompts.faults(by_divergence)]
    parting = parted(speak, begun, answer.greedy, clear=limits.clear)
    if limits.logit is not None:
        faults += found.quality.other_choices()
        faults += [f"a continuation parts at step {one.step}, by {one.margin:.3g}" for one in parting if not one.near]
    if faults:
        cause = likely_cause(truth, said, weights, config)
        lines = [f"{name}: llama.cpp does not say what the checkpoint says, and it was not written", *faults]
        more = [f"it is as if {cause}"] if cause else [] if limits.logit is not None else [LOOSEN]
        raise UserError("\n  ".join([*lines, *more]))
    return Proof(
        keys=keys,
        tensors=tensors,
        strings=len(strings),
        unicode=UNICODE,
        compared=compared,
        judged=found,
        prompts=of_prompts,
        continuations=len(begun),
        steps=steps,
        parted=parting,
        more_ends=tuple(sorted({*answer.ends} - {*checkpoint.stop_ids})),
    )


def _compared(prompt: Ids, wanted: np.ndarray, found: np.ndarray, allowed: float | None) -> Compared:
    """allowed: None where weights are rounded; there the divergence decides, and no difference of one logit."""
    largest = float(np.abs(wanted).max())
    difference = float(np.abs(found - wanted).max()) if found.shape == wanted.shape else float("nan")
    return Compared(len(prompt), difference, largest, allowed)


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


def _check_ids(answer: Answer, strings: list[str], checkpoint: Checkpoint, name: str) -> None:
    wanted = spoken_ids(checkpoint.tokenizer, strings)
    differing = [(text, a, b) for text, a, b in zip(strings, answer.ids, wanted, strict=True) if a != b]
    if differing:
        text, found, ours = differing[0]
        raise UserError(
            f"{name}: llama.cpp gives other ids to {len(differing)} of {len(strings)} texts, so it was not written. "
            f"Its pre-tokenizer is {answer.pre!r}. The first text: {text[:60]!r}, {found[:12]} there, {ours[:12]} here"
        )
