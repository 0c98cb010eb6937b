"""modicum run RECIPE"""

from pathlib import Path
from typing import Annotated

import typer

from modicum.cli.app import verb

RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe; `modicum new DIR` writes one.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one value, such as pretrain.steps=500.")
]


@verb("run", "modicum run recipes/quickstart.yaml --set pretrain.steps=500")
def run(
    recipe: RecipeFile,
    until: Annotated[str | None, typer.Option("--until", metavar="STAGE", help="Stop after this stage.")] = None,
    start: Annotated[
        str | None,
        typer.Option("--from", metavar="STAGE", help="Throw away this stage and those after it, and do them again."),
    ] = None,
    override: Overrides = None,
) -> None:
    """Go from text to an evaluated chat model; what is up to date is left alone, interrupted training goes on.

    The stages: corpus, tokenizer, shards, pretrain, sft, evaluate, report.
    """
    walk(recipe, override, until=until, start=start)


def walk(recipe: Path, override: list[str] | None, *, until: str | None = None, start: str | None = None) -> None:
    """Run the road, draw its progress, and print what came of it."""
    from modicum.cli.progress import TerminalListener
    from modicum.recipe import load_recipe

    loaded = load_recipe(recipe, override)
    from modicum.road.stages import run as run_road  # loads torch, for which a faulty recipe need not wait
    from modicum.road.summary import summary

    with TerminalListener() as listener:
        road = run_road(loaded, until=until, start=start, listener=listener)
    if road.ranks.is_first:
        print(summary(road))
