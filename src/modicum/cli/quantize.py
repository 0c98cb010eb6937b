"""modicum quantize CKPT --to int8|int4 --out DIR"""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from modicum.cli.app import verb
from modicum.cli.options import Checkpoint, Heldout, ReportAsJson


class BitsName(StrEnum):
    """What weights become."""

    INT8 = "int8"
    INT4 = "int4"


@verb("quantize", "modicum quantize runs/quickstart/sft/checkpoints/best --to int8 --out quickstart-int8")
def quantize(
    checkpoint: Checkpoint,
    to: Annotated[
        BitsName, typer.Option(help="int8: a quarter of the size; int4: an eighth, embedding and head int8.")
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to write, a new one.")],
    max_kl: Annotated[
        float | None,
        typer.Option(
            metavar="NATS",
            help="A budget of mean KL divergence: the matrices that cost most get more bits until it is met.",
        ),
    ] = None,
    min_agreement: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="How often the most probable token must be the same; 0.985 for int8, 0.93 for int4.",
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Text to fit to; without it, the model's own samples."),
    ] = None,
    heldout: Heldout = None,
    tune: Annotated[
        int, typer.Option(metavar="STEPS", help="Updates that tune the weights to their rounding, on --text.", min=0)
    ] = 0,
    as_json: ReportAsJson = False,
) -> None:
    """Round a checkpoint's weights to 8 or 4 bits, measured beside full precision before it is kept.

    The result is a checkpoint: generate, chat and serve take it, and transformers with compressed-tensors too. It
    cannot be trained on.
    """
    from modicum.cli.progress import TerminalListener
    from modicum.cli.quantize_table import quantize_lines
    from modicum.quantize import quantize_checkpoint

    with TerminalListener() as listener:
        report = quantize_checkpoint(
            checkpoint,
            to=to.value,
            out=out,
            max_kl=max_kl,
            min_agreement=min_agreement,
            text=text,
            heldout=heldout,
            tune_steps=tune,
            progress=listener.say,
        )
    if as_json:
        print(json.dumps(report.to_dict(), indent=2, ensure_ascii=False))
        return
    print("\n".join([*quantize_lines(report), f"written: {out}"]))
