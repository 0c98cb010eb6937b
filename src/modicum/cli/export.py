"""modicum export CKPT --to NAME [--quant TYPE] [--dtype TYPE] --out DIR"""

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from modicum.cli.app import verb
from modicum.cli.options import Checkpoint, Heldout, ReportAsJson

if TYPE_CHECKING:
    from modicum.exchange import Dtype, ExportReport, GgufReport, HfReport, OnnxQuant, OnnxReport, Quant, Scope


class TargetName(StrEnum):
    """What is written."""

    HF = "hf"
    GGUF = "gguf"
    ONNX = "onnx"
    CYBERSLM = "cyberslm"


class DtypeName(StrEnum):
    """The number types of a Hugging Face model."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


class QuantName(StrEnum):
    """The number types of a GGUF file, from f32 to q4_0, and of an ONNX one."""

    FP32 = "fp32"
    FP16 = "fp16"
    INT8 = "int8"
    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    Q8_0 = "q8_0"
    Q6_K = "q6_k"
    Q5_K = "q5_k"
    Q4_K = "q4_k"
    Q4_0 = "q4_0"


@verb("export", "modicum export runs/quickstart/sft/checkpoints/best --to gguf --quant q8_0 --out for-llama.cpp")
def export(
    checkpoint: Checkpoint,
    to: Annotated[
        TargetName,
        typer.Option(
            help="hf: a folder to hand on, with a model card; gguf: one file for llama.cpp; onnx: for onnxruntime, in "
            "a browser too; cyberslm: model.pt, config.json, tokenizer."
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to write, a new one.")],
    quant: Annotated[
        QuantName | None,
        typer.Option(
            help="The number type of matrices in a GGUF file (f32 to q4_0) or an ONNX one (fp32, fp16, int8)."
        ),
    ] = None,
    dtype: Annotated[DtypeName | None, typer.Option(help="The number type of a Hugging Face model; fp32.")] = None,
    max_shard_size: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Hugging Face: the largest file of weights, as 200MB; 5GB.")
    ] = None,
    max_kl: Annotated[
        float | None,
        typer.Option(
            metavar="NATS",
            help="The largest mean KL divergence from full precision; ten times it for the 99th percentile.",
        ),
    ] = None,
    min_agreement: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="How often the most probable token must be the same; 0.985 at eight bits."),
    ] = None,
    max_difference: Annotated[
        float | None,
        typer.Option(
            metavar="LOGIT",
            help="The largest difference of a logit in a float32 file; 1e-3 in llama.cpp, 1e-4 in onnxruntime.",
        ),
    ] = None,
    heldout: Heldout = None,
    texts: Annotated[int, typer.Option(help="How many texts of it are compared, token by token.", min=1)] = 50,
    strings: Annotated[int, typer.Option(help="How many strings must get the same ids.", min=1)] = 10_000,
    as_json: ReportAsJson = False,
) -> None:
    """Write a checkpoint for other tools, when it is proven to say there what it says here.

    What the target has no word for is refused by name, and nothing is written. A checkpoint is a Hugging Face model as
    it lies; --to hf makes the folder to hand on. A GGUF file is run by llama.cpp itself before it gets its name, an
    ONNX file by onnxruntime; the extras gguf and onnx of this package bring them.
    """
    from modicum.cli.parity_table import export_lines
    from modicum.cli.progress import TerminalListener
    from modicum.exchange import Scope
    from modicum.store import UserError

    _check(to, quant, dtype, max_shard_size)
    kind = (quant or _QUANTS[to][0] if to in _QUANTS else dtype or DtypeName.FP32).value
    scope = Scope(texts=texts, strings=strings, heldout=heldout)
    bounds = {"max_kl": max_kl, "min_agreement": min_agreement, "max_difference": max_difference}
    if to is TargetName.CYBERSLM and (scope != Scope() or any(value is not None for value in bounds.values())):
        raise UserError("--max-..., --min-..., --heldout, --texts, --strings: cyberslm's file is compared bit for bit")
    if max_difference is not None and (to is TargetName.HF or kind not in (QuantName.F32, QuantName.FP32)):
        raise UserError("--max-difference: only a GGUF file of f32 and an ONNX one of fp32 are held to it")
    with TerminalListener() as listener:
        how: dict[str, Any] = {"out": out, "progress": listener.say}
        report = _written(to, checkpoint, kind, max_shard_size, bounds, scope, how)
    if as_json:
        print(json.dumps(report.to_dict(), indent=2, ensure_ascii=False))
        return
    print("\n".join(export_lines(checkpoint, report)))


_QUANTS = {
    TargetName.GGUF: tuple(QuantName)[tuple(QuantName).index(QuantName.F32) :],
    TargetName.ONNX: (QuantName.FP32, QuantName.FP16, QuantName.INT8),
}


def _check(
    to: TargetName,
    quant: QuantName | None,
    dtype: DtypeName | None,
    max_shard_size: str | None,
) -> None:
    """Raises UserError for a setting that the target does not have."""
    from modicum.store import UserError

    if quant is not None and quant not in _QUANTS.get(to, ()):
        having = ", ".join(f"--to {name}: {', '.join(kinds)}" for name, kinds in _QUANTS.items())
        raise UserError(f"--quant {quant.value}: only GGUF and ONNX files have number types to choose from ({having})")
    if (dtype is not None or max_shard_size is not None) and to is not TargetName.HF:
        raise UserError("--dtype and --max-shard-size: only a Hugging Face model has them (--to hf)")


def _written(
    to: TargetName,
    checkpoint: Path,
    kind: str,
    max_shard_size: str | None,
    bounds: dict[str, float | None],
    scope: "Scope",
    how: dict[str, Any],
) -> "ExportReport | GgufReport | HfReport | OnnxReport":
    """bounds: what stands in the place of the usual limits."""
    from modicum import exchange

    if to is TargetName.CYBERSLM:
        return exchange.export_checkpoint(checkpoint, to="cyberslm", **how)
    how["scope"] = scope
    if to is TargetName.GGUF:
        how["limits"] = exchange.LIMITS[cast("Quant", kind)].with_bounds(**bounds)
        return exchange.export_gguf(checkpoint, quant=cast("Quant", kind), **how)
    if to is TargetName.ONNX:
        how["limits"] = exchange.ONNX_LIMITS[cast("OnnxQuant", kind)].with_bounds(**bounds)
        return exchange.export_onnx(checkpoint, quant=cast("OnnxQuant", kind), **how)
    how["limits"] = exchange.HF_LIMITS[cast("Dtype", kind)].with_bounds(**bounds)
    if max_shard_size is not None:
        how["shard_bytes"] = exchange.size_of(max_shard_size)
    return exchange.export_hf(checkpoint, dtype=cast("Dtype", kind), **how)
