"""modicum export CKPT --to NAME --out DIR"""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from modicum.cli.app import verb


class TargetName(StrEnum):
    """What is written."""

    CYBERSLM = "cyberslm"


@verb("export", "modicum export runs/quickstart/sft/checkpoints/best --to cyberslm --out for-cyberslm")
def export(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CKPT", help="A checkpoint, such as runs/quickstart/sft/checkpoints/last.")
    ],
    to: Annotated[
        TargetName, typer.Option(help="What to write; now cyberslm: model.pt in its names, config.json, tokenizer.")
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to write, a new one.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Write a checkpoint for other tools, when its logits are proven to be the same.

    A checkpoint is a Hugging Face model as it lies, so that there is nothing to export for transformers. What the
    target has no word for is refused by name, and nothing is written.
    """
    from modicum.cli.progress import TerminalListener
    from modicum.exchange import export_checkpoint

    with TerminalListener() as listener:
        report = export_checkpoint(checkpoint, to=to.value, out=out, progress=listener.say)
    if as_json:
        print(json.dumps(report.to_dict(), indent=2, ensure_ascii=False))
        return
    from modicum.cli.parity_table import parity_lines

    print(f"{checkpoint} for {report.to}: {report.parameters:,} parameters in {report.tensors} tensors")
    print("\n".join(parity_lines(report.compared)))
    print(f"written: {out}")
