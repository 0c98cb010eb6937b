"""A checkpoint leaves as a Hugging Face model of its own: another number type, shards, and a card that says what it is.

A checkpoint is such a model as it lies; this is the folder to hand on, without what training needs to go on.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from modicum.checkpoint import Checkpoint, load_checkpoint
from modicum.checkpoint.save import WEIGHTS, write_model
from modicum.evaluate.beside import Judged, judged
from modicum.evaluate.divergence import LOOSEN, Limits
from modicum.evaluate.texts import judging_texts
from modicum.exchange.gguf_gate import LIMITS
from modicum.exchange.hf_card import model_card
from modicum.exchange.hf_shards import SHARD_BYTES, in_shards
from modicum.exchange.layouts import relaid
from modicum.exchange.leaving import leaving
from modicum.exchange.names import HEAD
from modicum.exchange.parity import TOLERANCE, Compared, decoder_speaker, prove, truth_of
from modicum.exchange.scope import SCOPE, Scope
from modicum.exchange.stored import find_stored
from modicum.exchange.strings import UNICODE, agreed_strings, check_tokenizer
from modicum.model import ModelConfig
from modicum.store import UserError, atomic_directory, read_json, refuse_taken, write_json, write_text

Dtype = Literal["fp32", "bf16", "fp16"]
DTYPES: dict[Dtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HF_LIMITS: dict[Dtype, Limits] = {
    "fp32": replace(LIMITS["f32"], logit=None),  # the weights are the same, bit for bit
    "bf16": replace(LIMITS["bf16"], agreement=0.97),  # its arithmetic turns near ties besides, one or two in a hundred
    "fp16": replace(LIMITS["f16"], agreement=0.99),
}


@dataclass(frozen=True)
class HfReport:
    """What was written: files of weights, their bytes; strings, of which characters, with equal ids; compared: what the
    folder, read back, says in float32 beside the checkpoint; judged: how far it is from it on texts, computing in its
    own type, as transformers does; evaluated: whether the card has an evaluation."""

    out: Path
    architecture: str
    dtype: Dtype
    parameters: int
    files: tuple[str, ...]
    bytes: int
    checkpoint_bytes: int
    limits: Limits
    strings: int
    unicode: str
    compared: tuple[Compared, ...]
    judged: Judged
    evaluated: bool

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON data."""
        return {**asdict(self), "out": str(self.out)}


def export_hf(
    checkpoint: Path,
    *,
    dtype: Dtype = "fp32",
    shard_bytes: int = SHARD_BYTES,
    out: Path,
    limits: Limits | None = None,
    scope: Scope | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> HfReport:
    """Write a checkpoint as the folder `out`: weights of `dtype`, in files of at most `shard_bytes` with an index where
    there are several, config, tokenizer, README.md and parity.json.

    limits: how far it may be from full precision; without them, HF_LIMITS[dtype]. Raises UserError, and writes
    nothing, when a number is beyond the type, when the folder read back is not the checkpoint, and when `out` is there.
    """
    refuse_taken(out)
    limits, scope = limits or HF_LIMITS[dtype], scope or SCOPE
    progress(f"reading {checkpoint}")
    loaded = leaving(load_checkpoint(checkpoint))
    weights = _rounded(loaded.weights, DTYPES[dtype], checkpoint)
    progress(f"writing {out}")
    with atomic_directory(out) as unfinished:
        stops = loaded.stop_ids
        write_model(
            unfinished,
            config=loaded.config,
            weights=weights,
            tokenizer=loaded.tokenizer,
            chat=len(stops) > 1,
            stop_ids=stops,
        )
        files = in_shards(unfinished / WEIGHTS, shard_bytes)
        progress("reading it back and comparing it with the checkpoint")
        strings = agreed_strings(loaded.tokenizer, scope.strings)
        compared, found = _prove(unfinished, str(out), loaded, weights, limits, scope, exact=dtype == "fp32")
        check_tokenizer(unfinished, str(out), loaded.tokenizer, strings)
        card, evaluated = model_card(loaded, DTYPES[dtype])
        write_text(unfinished / "README.md", card)
        report = HfReport(
            out=out,
            architecture=loaded.config.to_hf()["architectures"][0],
            dtype=dtype,
            parameters=loaded.config.parameter_count(),
            files=files,
            bytes=sum((unfinished / file).stat().st_size for file in files),
            checkpoint_bytes=sum(weight.nbytes for weight in loaded.weights.values()),
            limits=limits,
            strings=len(strings),
            unicode=UNICODE,
            compared=compared,
            judged=found,
            evaluated=evaluated,
        )
        write_json(unfinished / "parity.json", {key: v for key, v in report.to_dict().items() if key != "out"})
    return report


def _rounded(weights: Mapping[str, Tensor], dtype: torch.dtype, checkpoint: Path) -> dict[str, Tensor]:
    rounded = {name: weight.to(dtype) for name, weight in weights.items()}
    beyond = [name for name, weight in rounded.items() if not weight.isfinite().all()]
    if beyond:
        kind = str(dtype).removeprefix("torch.")
        raise UserError(f"{checkpoint}: {', '.join(beyond)}: numbers beyond {kind}; take --dtype bf16 or fp32")
    return rounded


def _prove(
    folder: Path,
    name: str,
    source: Checkpoint,
    written: Mapping[str, Tensor],
    limits: Limits,
    scope: Scope,
    *,
    exact: bool,
) -> tuple[tuple[Compared, ...], Judged]:
    """The folder against the checkpoint: files of words, the weights' bits, then what they say."""
    found, config = find_stored(folder).read(), source.config
    faults = _different_words(folder, source)
    tied = " (the head is tied: it is the embedding)"
    faults += [f"{tensor}: missing" for tensor in sorted(written.keys() - found.keys())]
    faults += [f"{t}: left over{tied if t == HEAD else ''}" for t in sorted(found.keys() - written.keys())]
    faults += [
        _difference(tensor, found[tensor], written, config.head_dim)
        for tensor in sorted(written.keys() & found.keys())
        if found[tensor].dtype != written[tensor].dtype or not torch.equal(found[tensor], written[tensor])
    ]
    if faults:
        raise UserError("\n  ".join([f"{name}: read back, it is not the checkpoint, and was not written", *faults]))
    truth = truth_of(source.weights, config)
    speak, speak_full = decoder_speaker(found, config), decoder_speaker(source.weights, config)
    # where numbers were rounded, the divergence decides
    compared = prove(name, speak, truth, tolerance=TOLERANCE if exact else None)
    texts = judging_texts(source, scope.heldout, texts=scope.texts, tokens=scope.tokens)
    asked = decoder_speaker(found, config, next(iter(found.values())).dtype)  # transformers computes in the file's type
    given, rows = map(speak_full, texts.rows), map(asked, texts.rows)
    measured = judged(texts, source.tokenizer, given, rows, clear=limits.clear)
    if over := measured.quality.faults(limits):
        what = "does not say what the checkpoint says" if exact else "its number type costs too much"
        more = [] if exact else [LOOSEN]
        raise UserError("\n  ".join([f"{name}: {what}, and it was not written", *over, *more]))
    return compared, measured


def _different_words(folder: Path, source: Checkpoint) -> list[str]:
    """What the config and the ends of an answer are, beside the checkpoint's."""
    faults = []
    if ModelConfig.from_hf(read_json(folder / "config.json")) != source.config:
        faults.append("config.json: describes another model than the checkpoint's")
    stops = read_json(folder / "generation_config.json").get("eos_token_id")
    if stops != source.stop_ids:
        faults.append(f"generation_config.json: eos_token_id is {stops}, the checkpoint ends at {source.stop_ids}")
    return faults


def _difference(name: str, there: Tensor, written: Mapping[str, Tensor], head_dim: int) -> str:
    """How a tensor differs, and whose numbers it holds, in which order, where they are others'."""
    ours = written[name]
    if there.dtype != ours.dtype:
        return f"{name}: is {there.dtype}, should be {ours.dtype}"
    if there.shape != ours.shape:
        return f"{name}: has shape {list(there.shape)}, should have {list(ours.shape)}"
    if torch.equal(relaid({name: ours}, head_dim=head_dim, source="half", target="interleaved")[name], there):
        return f"{name}: its rows are in the interleaved rotary layout, transformers reads the half-split one"
    other = next((n for n, w in written.items() if w.shape == there.shape and torch.equal(w, there)), None)
    return f"{name}: holds the numbers of {other}" if other else f"{name}: differs from the checkpoint's"
