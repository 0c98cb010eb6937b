"""modicum prepare | pretrain | sft | evaluate | report RECIPE: the road up to one stage."""

from typing import Annotated

import typer

from modicum.cli.app import verb
from modicum.cli.run import Overrides, RecipeFile, walk

Afresh = Annotated[bool, typer.Option("--afresh", help="Throw away this stage's results first, and all after it.")]


@verb("prepare", "modicum prepare recipes/quickstart.yaml")
def prepare(recipe: RecipeFile, afresh: Afresh = False, override: Overrides = None) -> None:
    """Clean the corpus, train the tokenizer, write the token shards."""
    walk(recipe, override, until="shards", start="corpus" if afresh else None)


@verb("pretrain", "modicum pretrain recipes/quickstart.yaml --set pretrain.steps=1000")
def pretrain(recipe: RecipeFile, afresh: Afresh = False, override: Overrides = None) -> None:
    """Train the base model, from the last checkpoint on; more steps than before extend the run."""
    walk(recipe, override, until="pretrain", start="pretrain" if afresh else None)


@verb("sft", "modicum sft recipes/quickstart.yaml")
def sft(recipe: RecipeFile, afresh: Afresh = False, override: Overrides = None) -> None:
    """Tune the base model on conversations."""
    walk(recipe, override, until="sft", start="sft" if afresh else None)


@verb("evaluate", "modicum evaluate recipes/quickstart.yaml")
def evaluate(recipe: RecipeFile, afresh: Afresh = False, override: Overrides = None) -> None:
    """Measure the models on held-out text, questions and prompts."""
    walk(recipe, override, until="evaluate", start="evaluate" if afresh else None)


@verb("report", "modicum report recipes/quickstart.yaml")
def report(recipe: RecipeFile, afresh: Afresh = False, override: Overrides = None) -> None:
    """Write the report: one HTML page and a JSON file with every figure."""
    walk(recipe, override, until="report", start="report" if afresh else None)
