"""modicum plan RECIPE"""

import json
import sys
from typing import Annotated

import typer

from modicum.cli.app import verb
from modicum.cli.run import Overrides, RecipeFile


@verb("plan", "modicum plan recipes/quickstart.yaml --set pretrain.steps=1000")
def plan(
    recipe: RecipeFile,
    measure: Annotated[
        bool, typer.Option("--measure/--no-measure", help="Try a few updates here; without, no hours are known.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print every figure as JSON.")] = False,
    override: Overrides = None,
) -> None:
    """Say what a run will cost here: parameters, tokens, FLOPs, memory, disk and hours, before anything runs.

    A run that does not fit into this machine's memory or disk is refused with status 2.
    """
    from modicum.recipe import load_recipe

    loaded = load_recipe(recipe, override)
    if measure:
        print("trying a few updates here, up to a minute where they must be compiled first ...", file=sys.stderr)
    from modicum.road.plan import plan as plan_run

    found = plan_run(loaded, measure=measure)
    if as_json:
        print(json.dumps(found.to_dict(), indent=2, ensure_ascii=False))
        return
    from modicum.cli.plan_table import plan_lines

    print("\n".join(plan_lines(found)))
