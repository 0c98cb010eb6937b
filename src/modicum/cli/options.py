"""Arguments and options that several verbs have, each with the words that all of them show."""

from pathlib import Path
from typing import Annotated

import typer

Checkpoint = Annotated[
    Path, typer.Argument(metavar="CKPT", help="A checkpoint, such as runs/quickstart/sft/checkpoints/last.")
]
Heldout = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Text to be judged by; without it, the held-out text of its run, or else the model's own samples.",
    ),
]
Rounds = Annotated[int, typer.Option(help="Rounds; each system has a turn in each.", min=1)]
ReportAsJson = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]
TableAsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")]

# What is said of a model that is to answer and was trained for text alone.
NEVER_TALKED = (
    "never learned to end a turn, so its answers run on until something else ends them; a run's chat model is its "
    "sft/checkpoints/last"
)

MaxNewTokens = Annotated[int, typer.Option(help="At most so many tokens.")]
Temperature = Annotated[float, typer.Option(help="0 takes the most probable token each time.")]
TopK = Annotated[int, typer.Option(help="Only the k most probable tokens; 0 for all.")]
TopP = Annotated[float, typer.Option(help="Only the most probable tokens that together reach this probability.")]
MinP = Annotated[float, typer.Option(help="Only tokens at least so probable, relative to the best.")]
RepetitionPenalty = Annotated[float, typer.Option(help="Above 1, what was said already becomes less probable.")]
Seed = Annotated[int, typer.Option(help="The same seed gives the same answer.")]
