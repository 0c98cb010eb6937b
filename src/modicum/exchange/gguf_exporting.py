"""A checkpoint leaves as a GGUF file, when llama.cpp has run it and said what the checkpoint says."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from modicum.checkpoint import Checkpoint, load_checkpoint
from modicum.evaluate.beside import Cost, check_free, cost_of_full
from modicum.evaluate.divergence import Limits
from modicum.exchange.children import passing_folder
from modicum.exchange.gguf_gate import LIMITS, Proof, prove_gguf
from modicum.exchange.gguf_runtime import library, timed
from modicum.exchange.gguf_vocabulary import unflagged_ids
from modicum.exchange.gguf_weights import Quant, file_tensors, gguf_library
from modicum.exchange.gguf_writing import file_metadata, write_gguf
from modicum.exchange.leaving import leaving
from modicum.exchange.scope import SCOPE, Scope
from modicum.exchange.strings import composes
from modicum.store import UserError, atomic_directory, refuse_taken, write_json
from modicum.tokenizer import Tokenizer

_SPOKEN = 64  # tokens of the answer that is timed


@dataclass(frozen=True)
class GgufReport:
    """What was written: the file, what it costs in llama.cpp, and what float32 costs there, where it fits; fallbacks:
    tensor, type, reason of those that did not take the type that was asked for; what llama.cpp said; notes: what it
    does otherwise, and what could not be measured."""

    out: Path
    file: str
    quant: Quant
    parameters: int
    cost: Cost
    full: Cost | None
    fallbacks: tuple[tuple[str, str, str], ...]
    limits: Limits
    proof: Proof
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON data."""
        return {**asdict(self), "out": str(self.out)}


def export_gguf(
    checkpoint: Path,
    *,
    quant: Quant = "f32",
    out: Path,
    limits: Limits | None = None,
    scope: Scope | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> GgufReport:
    """Write a checkpoint as the folder `out` with model-<quant>.gguf and parity.json.

    limits: how far it may be from full precision; without them, LIMITS[quant]. Raises UserError, and writes
    nothing, when GGUF has no word for a part of the model or its tokenizer, when llama.cpp does not say what the
    checkpoint says, when gguf or xllamacpp is not installed, and when `out` is there already.
    """
    refuse_taken(out)
    gguf_library(), library()
    limits = limits or LIMITS[quant]
    progress(f"reading {checkpoint}")
    loaded = leaving(load_checkpoint(checkpoint))
    try:
        metadata = file_metadata(loaded.config, loaded.tokenizer, quant)
    except UserError as error:
        raise UserError(f"{checkpoint}: {error}") from None
    name = f"model-{quant}.gguf"
    progress(f"writing {out}")
    with atomic_directory(out) as unfinished:
        file = unfinished / name
        with passing_folder(unfinished) as work:  # gigabytes, for which there is room where the file goes
            tensors = file_tensors(loaded.weights, loaded.config, quant, work)
            others = write_gguf(file, loaded.config, metadata, tensors)
            proof = prove_gguf(file, str(out / name), loaded, quant, limits, scope or SCOPE, progress, work)
        progress("measuring what it costs")
        cost = _cost(file, loaded)
        full, untold = cost_of_full(lambda: cost if quant == "f32" else _full(unfinished / "full.gguf", loaded))
        report = GgufReport(
            out=out,
            file=name,
            quant=quant,
            parameters=loaded.config.parameter_count(),
            cost=cost,
            full=full,
            fallbacks=tuple((tensor.name, tensor.kind, tensor.fallback or "") for tensor in others),
            limits=limits,
            proof=proof,
            notes=(*untold, *_otherwise(loaded.tokenizer, proof.more_ends)),
        )
        write_json(unfinished / "parity.json", {key: v for key, v in report.to_dict().items() if key != "out"})
    return report


def _full(file: Path, checkpoint: Checkpoint) -> Cost:
    """What float32 costs on this machine now, from a file that is thrown away. UserError where memory is short."""
    check_free(4 * checkpoint.config.parameter_count())
    metadata = file_metadata(checkpoint.config, checkpoint.tokenizer, "f32")
    try:
        write_gguf(file, checkpoint.config, metadata, file_tensors(checkpoint.weights, checkpoint.config, "f32"))
        return _cost(file, checkpoint)
    finally:
        file.unlink(missing_ok=True)


def _cost(file: Path, checkpoint: Checkpoint) -> Cost:
    tokens = min(_SPOKEN, checkpoint.config.max_position_embeddings - 1)
    start = [checkpoint.tokenizer.bos_id]
    found = timed(file, start, start, tokens=tokens, repeats=1, threads=torch.get_num_threads())
    (seconds,) = found["decode"]
    return Cost(file.stat().st_size, found["load_seconds"], tokens / seconds, found["memory_bytes"])


def _otherwise(tokenizer: Tokenizer, ends: Sequence[int]) -> Iterator[str]:
    """What llama.cpp does otherwise with the file. ends: at which it ends an answer besides."""
    if composes(tokenizer):
        yield "llama.cpp does not compose accents (NFC) as the tokenizer does: give it composed text, as was compared"
    names = {number: token for token, number in tokenizer.definition["model"]["vocab"].items()}
    if unflagged := unflagged_ids(tokenizer):
        named = ", ".join(names[number] for number in unflagged)
        yield f"llama.cpp leaves control tokens out of an answer's text, these too, which the checkpoint shows: {named}"
    for number in ends:
        token = names.get(number, "a token")
        yield f"an answer ends at {token} (id {number}) in llama.cpp, and goes on in the checkpoint"
