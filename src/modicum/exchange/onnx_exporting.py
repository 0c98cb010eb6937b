"""A checkpoint leaves as an ONNX model, when onnxruntime has run it and said what the checkpoint says."""

import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from modicum.checkpoint import Checkpoint, load_checkpoint
from modicum.evaluate.beside import Cost, check_free, cost_of_full
from modicum.evaluate.divergence import Limits
from modicum.exchange.children import passing_folder
from modicum.exchange.leaving import leaving
from modicum.exchange.onnx_gate import LIMITS, OnnxProof, prove_onnx
from modicum.exchange.onnx_nodes import onnx_library
from modicum.exchange.onnx_runtime import ask_onnx, check_runtime
from modicum.exchange.onnx_weights import OnnxQuant
from modicum.exchange.onnx_writing import DATA_BYTES, model_file, write_graph, write_onnx
from modicum.exchange.scope import SCOPE, Scope
from modicum.store import UserError, atomic_directory, refuse_taken, write_json

ONNX_LIMITS = LIMITS
_SPOKEN = 64  # tokens of the answer that is timed


@dataclass(frozen=True)
class OnnxReport:
    """What was written: the graph, what it costs in onnxruntime, and what float32 costs there, where it fits; what was
    compared; notes: what could not be measured."""

    out: Path
    file: str
    quant: OnnxQuant
    parameters: int
    cost: Cost
    full: Cost | None
    limits: Limits
    proof: OnnxProof
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON data."""
        return {**asdict(self), "out": str(self.out)}


def export_onnx(
    checkpoint: Path,
    *,
    quant: OnnxQuant = "fp32",
    out: Path,
    limits: Limits | None = None,
    scope: Scope | None = None,
    data_bytes: int = DATA_BYTES,
    progress: Callable[[str], None] = lambda _: None,
) -> OnnxReport:
    """Write a checkpoint as the folder `out`: onnx/model<quant>.onnx, its configs, the tokenizer and parity.json.

    limits: how far it may be from full precision; without them, ONNX_LIMITS[quant]. Raises UserError, and
    writes nothing, when onnxruntime does not say what the checkpoint says, when onnx or onnxruntime is not installed,
    and when `out` is there already.
    """
    refuse_taken(out)
    onnx_library()
    check_runtime()
    limits = limits or ONNX_LIMITS[quant]
    progress(f"reading {checkpoint}")
    loaded = leaving(load_checkpoint(checkpoint))
    file = model_file(quant)
    progress(f"writing {out}")
    with atomic_directory(out) as unfinished:
        try:
            write_onnx(unfinished, loaded, quant, data_bytes=data_bytes)
        except UserError as error:
            raise UserError(f"{checkpoint}: {error}") from None
        with passing_folder(unfinished) as work:  # gigabytes, for which there is room where the graph goes
            proof = prove_onnx(unfinished, file, str(out / file), loaded, quant, limits, scope or SCOPE, progress, work)
        progress("measuring what it costs")
        cost = _cost(unfinished / file, loaded)
        full, untold = cost_of_full(lambda: cost if quant == "fp32" else _full(unfinished / "full", loaded))
        report = OnnxReport(
            out=out,
            file=file,
            quant=quant,
            parameters=loaded.config.parameter_count(),
            cost=cost,
            full=full,
            limits=limits,
            proof=proof,
            notes=untold,
        )
        write_json(unfinished / "parity.json", {key: v for key, v in report.to_dict().items() if key != "out"})
    return report


def _full(folder: Path, checkpoint: Checkpoint) -> Cost:
    """What float32 costs on this machine now, from a graph that is thrown away. UserError where memory is short."""
    check_free(2 * 4 * checkpoint.config.parameter_count())  # onnxruntime packs what it multiplies by once more
    file = folder / "model.onnx"
    try:
        write_graph(file, checkpoint, "fp32")
        return _cost(file, checkpoint)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _cost(file: Path, checkpoint: Checkpoint) -> Cost:
    steps = min(_SPOKEN, checkpoint.config.max_position_embeddings - 1)
    answer = ask_onnx(file, name=str(file), begun=[[checkpoint.tokenizer.bos_id]] * 2, steps=steps)
    size = sum(one.stat().st_size for one in file.parent.iterdir())
    return Cost(size, answer.load_seconds, answer.tokens_per_second, answer.memory_bytes)
