"""modicum export CKPT --to NAME [--quant TYPE] [--dtype TYPE] --out DIR"""

import json
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from modicum.cli.app import verb

if TYPE_CHECKING:
    from modicum.exchange import Dtype, Limits, OnnxQuant, Quant


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
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CKPT", help="A checkpoint, such as runs/quickstart/sft/checkpoints/last.")
    ],
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
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Write a checkpoint for other tools, when it is proven to say there what it says here.

    What the target has no word for is refused by name, and nothing is written. A checkpoint is a Hugging Face model as
    it lies; --to hf makes the folder to hand on. A GGUF file is run by llama.cpp itself before it gets its name, an
    ONNX file by onnxruntime; the extras gguf and onnx of this package bring them.
    """
    from modicum.store import UserError

    if quant is not None and quant.value not in _QUANTS.get(to, ()):
        having = ", ".join(f"--to {name}: {', '.join(kinds)}" for name, kinds in _QUANTS.items())
        raise UserError(f"--quant {quant.value}: only GGUF and ONNX files have number types to choose from ({having})")
    if (dtype is not None or max_shard_size is not None) and to is not TargetName.HF:
        raise UserError("--dtype and --max-shard-size: only a Hugging Face model has them (--to hf)")
    if max_kl is not None and to is TargetName.CYBERSLM:
        raise UserError("--max-kl: nothing is rounded in cyberslm's file")
    if max_kl is not None and not 0 < max_kl <= 100:
        raise UserError(f"--max-kl {max_kl:g}: expected a number of nats above 0, such as 0.01")
    if to is TargetName.GGUF:
        report, lines = _gguf(checkpoint, out, cast("Quant", (quant or QuantName.F32).value), max_kl)
    elif to is TargetName.ONNX:
        report, lines = _onnx(checkpoint, out, cast("OnnxQuant", (quant or QuantName.FP32).value), max_kl)
    elif to is TargetName.HF:
        report, lines = _hf(checkpoint, out, (dtype or DtypeName.FP32).value, max_shard_size, max_kl)
    else:
        report, lines = _cyberslm(checkpoint, out)
    if as_json:
        print(json.dumps(report, indent=2, ensure_ascii=False))
        return
    print("\n".join(lines))


_ONNX = (QuantName.FP32, QuantName.FP16, QuantName.INT8)
_QUANTS = {
    TargetName.GGUF: tuple(name.value for name in QuantName if name not in _ONNX),
    TargetName.ONNX: tuple(name.value for name in _ONNX),
}
_Told = tuple[dict[str, Any], list[str]]  # the report as data, and as lines


def _limits(usual: "Limits", max_kl: float | None) -> "Limits":
    return usual if max_kl is None else replace(usual, mean_kl=max_kl, tail_kl=10 * max_kl)


def _cyberslm(checkpoint: Path, out: Path) -> _Told:
    from modicum.cli.parity_table import parity_lines
    from modicum.cli.progress import TerminalListener
    from modicum.exchange import export_checkpoint

    with TerminalListener() as listener:
        report = export_checkpoint(checkpoint, to="cyberslm", out=out, progress=listener.say)
    return report.to_dict(), [
        f"{checkpoint} for {report.to}: {report.parameters:,} parameters in {report.tensors} tensors",
        *(f"  {note}" for note in report.notes),
        *parity_lines(report.compared),
        f"written: {out}",
    ]


def _hf(checkpoint: Path, out: Path, dtype: "Dtype", max_shard_size: str | None, max_kl: float | None) -> _Told:
    from modicum.cli.parity_table import hf_lines
    from modicum.cli.progress import TerminalListener
    from modicum.exchange import HF_LIMITS, export_hf, size_of

    shards = {} if max_shard_size is None else {"shard_bytes": size_of(max_shard_size)}
    limits = _limits(HF_LIMITS[dtype], max_kl)
    with TerminalListener() as listener:
        report = export_hf(checkpoint, dtype=dtype, out=out, limits=limits, progress=listener.say, **shards)
    return report.to_dict(), [
        f"{checkpoint} for transformers: {report.architecture}, {report.parameters:,} parameters as {dtype}",
        *hf_lines(report),
        f"written: {out}, {out / 'README.md'}, {out / 'parity.json'}",
    ]


def _gguf(checkpoint: Path, out: Path, quant: "Quant", max_kl: float | None) -> _Told:
    from modicum.cli.parity_table import gguf_lines
    from modicum.cli.progress import TerminalListener
    from modicum.exchange import LIMITS, export_gguf

    limits = _limits(LIMITS[quant], max_kl)
    with TerminalListener() as listener:
        report = export_gguf(checkpoint, quant=quant, out=out, limits=limits, progress=listener.say)
    return report.to_dict(), [
        f"{checkpoint} for llama.cpp: {report.parameters:,} parameters as {quant}",
        *gguf_lines(report),
        f"written: {out / report.file}, {out / 'parity.json'}",
    ]


def _onnx(checkpoint: Path, out: Path, quant: "OnnxQuant", max_kl: float | None) -> _Told:
    from modicum.cli.parity_table import onnx_lines
    from modicum.cli.progress import TerminalListener
    from modicum.exchange import ONNX_LIMITS, export_onnx

    limits = _limits(ONNX_LIMITS[quant], max_kl)
    with TerminalListener() as listener:
        report = export_onnx(checkpoint, quant=quant, out=out, limits=limits, progress=listener.say)
    return report.to_dict(), [
        f"{checkpoint} for onnxruntime: {report.parameters:,} parameters as {quant}",
        *onnx_lines(report),
        f"written: {out / report.file}, {out / 'genai_config.json'}, {out / 'parity.json'}",
    ]
