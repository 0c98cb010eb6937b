"""The plan that a run keeps: made before its first update, so that the report can set it beside what was used."""

from modicum.road.context import Road
from modicum.road.plan import plan
from modicum.road.words import duration, size
from modicum.store import write_json

# Below this much arithmetic (about a minute on two cores) a trial would cost as much as the run.
_WORTH_A_TRIAL_FLOPS = 1e13


def keep_plan(road: Road) -> None:
    """Write plan.json into the run's folder, unless pretraining has begun. Raises UserError when the run cannot fit."""
    if (road.run.checkpoints("pretrain") / "last").exists():
        return
    found = plan(road.recipe, measure=False)
    if found.flops >= _WORTH_A_TRIAL_FLOPS:
        road.listener.say("plan: trying a few updates here")
        found = plan(road.recipe)
    write_json(road.run.path / "plan.json", found.to_dict())
    time = "" if found.seconds is None else f"about {duration(found.seconds)} for the whole run, "
    road.listener.say(f"plan: {time}{size(found.memory.total)} of memory at most, {size(found.disk.total)} of disk")
