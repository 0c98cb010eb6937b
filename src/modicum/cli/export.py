"""modicum export CKPT --to NAME [--quant TYPE] --out DIR"""

import json
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from modicum.cli.app import verb

if TYPE_CHECKING:
    from modicum.exchange import Quant


class TargetName(StrEnum):
    """What is written."""

    CYBERSLM = "cyberslm"
    GGUF = "gguf"


class QuantName(StrEnum):
    """The number types of a GGUF file."""

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
        typer.Option(help="gguf: one file for llama.cpp, and parity.json; cyberslm: model.pt, config.json, tokenizer."),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to write, a new one.")],
    quant: Annotated[QuantName | None, typer.Option(help="The number type of a GGUF file's matrices; f32.")] = None,
    max_kl: Annotated[
        float | None,
        typer.Option(
            metavar="NATS",
            help="GGUF: the largest mean KL divergence from full precision; ten times it for the 99th percentile.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Write a checkpoint for other tools, when it is proven to say there what it says here.

    A checkpoint is a Hugging Face model as it lies, so that there is nothing to export for transformers. What the
    target has no word for is refused by name, and nothing is written. A GGUF file is run by llama.cpp itself before it
    gets its name: pip install 'modicum[gguf]'.
    """
    from modicum.cli.progress import TerminalListener
    from modicum.exchange import export_checkpoint
    from modicum.store import UserError

    if to is TargetName.GGUF:
        _gguf(checkpoint, out, (quant or QuantName.F32).value, max_kl, as_json)
        return
    if quant is not None or max_kl is not None:
        raise UserError("--quant and --max-kl: only a GGUF file has them (--to gguf)")
    with TerminalListener() as listener:
        report = export_checkpoint(checkpoint, to="cyberslm", out=out, progress=listener.say)
    if as_json:
        print(json.dumps(report.to_dict(), indent=2, ensure_ascii=False))
        return
    from modicum.cli.parity_table import parity_lines

    print(f"{checkpoint} for {report.to}: {report.parameters:,} parameters in {report.tensors} tensors")
    print("\n".join([*(f"  {note}" for note in report.notes), *parity_lines(report.compared)]))
    print(f"written: {out}")


def _gguf(checkpoint: Path, out: Path, quant: "Quant", max_kl: float | None, as_json: bool) -> None:
    from modicum.cli.parity_table import gguf_lines
    from modicum.cli.progress import TerminalListener
    from modicum.exchange import LIMITS, export_gguf
    from modicum.store import UserError

    if max_kl is not None and not 0 < max_kl <= 100:
        raise UserError(f"--max-kl {max_kl:g}: expected a number of nats above 0, such as 0.01")
    limits = LIMITS[quant] if max_kl is None else replace(LIMITS[quant], mean_kl=max_kl, tail_kl=10 * max_kl)
    with TerminalListener() as listener:
        report = export_gguf(checkpoint, quant=quant, out=out, limits=limits, progress=listener.say)
    if as_json:
        print(json.dumps(report.to_dict(), indent=2, ensure_ascii=False))
        return
    print(f"{checkpoint} for llama.cpp: {report.parameters:,} parameters as {quant}")
    print("\n".join(gguf_lines(report)))
    print(f"written: {out / report.file}, {out / 'parity.json'}")
