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
    memory: Annotated[
        str | None, typer.Option(help="A budget such as 4GB: say what would have to change to keep within it.")
    ] = None,
    hours: Annotated[
        float | None, typer.Option(help="A budget of hours: say what would have to change.", min=0)
    ] = None,
    chip: Annotated[
        str | None, typer.Option(help="Also compute the time on this chip, from its published peak: h100, a100, l4 ...")
    ] = None,
    gpus: Annotated[int | None, typer.Option(help="How many of that chip; default 1.", min=1)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print every figure as JSON.")] = False,
    override: Overrides = None,
) -> None:
    """Say what a run will cost here: parameters, tokens, FLOPs, memory, disk and hours, before anything runs.

    A run that does not fit into this machine's memory or disk is refused with status 2.
    """
    from modicum.recipe import load_recipe
    from modicum.road.budget import budget_of
    from modicum.store import UserError

    loaded = load_recipe(recipe, override)
    if gpus is not None and chip is None:
        raise UserError("--gpus: needs --chip, which says what they are")
    budget = budget_of(memory, hours)
    if measure:
        print("trying a few updates here, up to a minute where they must be compiled first ...", file=sys.stderr)
    from modicum.road.plan import plan as plan_run

    found = plan_run(loaded, measure=measure, budget=budget, chip=chip, gpus=gpus or 1)
    if as_json:
        print(json.dumps(found.to_dict(), indent=2, ensure_ascii=False))
        return
    from modicum.cli.plan_table import plan_lines

    print("\n".join(plan_lines(found)))
