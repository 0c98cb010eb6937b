"""The plan that a run keeps: made before its first update, so that the report can set it beside what was used."""

from modicum.checkpoint import step_folder
from modicum.recipe import Recipe
from modicum.road.context import Road
from modicum.road.plan import plan
from modicum.road.start import model_config
from modicum.road.text import text_of
from modicum.road.words import duration, size
from modicum.road.works import training_works
from modicum.store import write_json

# Below this much arithmetic (about a minute on two cores) a trial would cost as much as the run.
_WORTH_A_TRIAL_FLOPS = 1e13


def keep_plan(road: Road) -> None:
    """Write plan.json into the run's folder, unless pretraining has begun. Raises UserError when the run cannot fit."""
    checkpoints = road.run.checkpoints("pretrain")
    if (checkpoints / "last").exists() and (checkpoints / "last").resolve() != step_folder(checkpoints, 0).resolve():
        return
    measure = _training_flops(road.recipe) >= _WORTH_A_TRIAL_FLOPS
    if measure:
        road.listener.say("plan: trying a few updates here")
    found = plan(road.recipe, measure=measure, ranks=road.ranks.world_size)
    write_json(road.run.path / "plan.json", found.to_dict())
    time = "" if found.seconds is None else f"about {duration(found.seconds)} for the whole run, "
    memory = size(found.memory.total) + (" a rank" if road.ranks.world_size > 1 else "")
    road.listener.say(f"plan: {time}{memory} of memory at most, {size(found.disk.total)} of disk")


def _training_flops(recipe: Recipe) -> float:
    text = text_of(recipe)
    return sum(work.flops for work in training_works(recipe, model_config(recipe, text.vocab_size), text))
