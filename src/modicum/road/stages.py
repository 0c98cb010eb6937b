"""The road: the stages in their order, each done when its inputs changed and left alone when they did not."""

import shutil
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial

from modicum import __version__
from modicum.recipe import Recipe, resolved_yaml
from modicum.road import measure, prepare, training
from modicum.road.context import Listener, Road, Silent
from modicum.road.planning import keep_plan
from modicum.road.reporting import make_report, report_inputs
from modicum.road.start import check_ranks, check_start
from modicum.store import UserError, run_lock, write_text
from modicum.train import joined


@dataclass(frozen=True)
class RoadStage:
    """inputs: what the stage depends on, as name to hash; work: does it. Both are given the road.

    outputs: files below the stage's folder without which it is not finished, whatever its manifest says. on_all_ranks:
    the ranks that torchrun has started do the work together; any other stage is the first one's, and the others wait.
    """

    name: str
    inputs: Callable[[Road], dict[str, str]]
    work: Callable[[Road], None]
    outputs: tuple[str, ...]
    on_all_ranks: bool = False


def _pretrain(road: Road) -> None:
    road.ranks.by_first(lambda: keep_plan(road))
    training.pretrain(road)


_SHARDS = tuple(f"{split}/{name}" for split in ("train", "heldout") for name in ("index.json", "manifest.json"))
STAGES = (
    RoadStage("corpus", prepare.corpus_inputs, prepare.make_corpus, ("text/manifest.json",)),
    RoadStage("tokenizer", prepare.tokenizer_inputs, prepare.make_tokenizer, ("files/tokenizer.json",)),
    RoadStage("shards", prepare.shards_inputs, prepare.make_shards, _SHARDS),
    RoadStage("pretrain", training.pretrain_inputs, _pretrain, ("checkpoints/last/manifest.json",), True),
    RoadStage("sft", training.sft_inputs, training.sft, ("checkpoints/last/manifest.json",), True),
    RoadStage("evaluate", measure.evaluate_inputs, measure.evaluate, (measure.RESULTS,)),
    RoadStage("report", report_inputs, make_report, ("index.html", "report.json")),
)
_TRAINING = [stage.name for stage in STAGES if stage.on_all_ranks]


def run(
    recipe: Recipe, *, until: str | None = None, start: str | None = None, listener: Listener | None = None
) -> Road:
    """Bring the run up to date, to the stage `until` (default: the last).

    A stage whose inputs are as they were is left alone; interrupted training goes on, another stage begins again.
    `start` throws away that stage's results and those of all after it first. A training stage never replaces
    checkpoints of another recipe by itself: it raises UserError that says what differs, and `start` is the way to begin
    anew. Started by torchrun, the processes go the road together.
    """
    with joined() as ranks, ExitStack() as held:
        road = Road(recipe, listener if listener is not None and ranks.is_first else Silent(), ranks)

        def begin() -> None:
            check_start(recipe)
            check_ranks(recipe, ranks.world_size)
            _chosen(recipe, until, start)
            held.enter_context(run_lock(road.run.path))
            for line in prepare.unread_files(recipe):
                road.listener.say(f"warning: {line}")
            if start is not None:
                _discard(road, start)
            if not road.run.recipe.exists():
                write_text(road.run.recipe, resolved_yaml(recipe))

        def accept() -> None:
            write_text(road.run.recipe, resolved_yaml(recipe))

        ranks.by_first(begin)
        done = 0
        for stage in _chosen(recipe, until, start):
            if stage.name == "evaluate":  # here both training stages have accepted the recipe as theirs
                ranks.by_first(accept)
            done += _bring_up_to_date(road, stage)
        trained = _chosen(recipe, until, start)[-1].name in _TRAINING
        ranks.by_first(lambda: accept() if trained or not _has_trained(road) else None)
        if not done:
            road.listener.say(f"{road.run.path}: everything is up to date")
    return road


def _has_trained(road: Road) -> bool:
    """Whether a model lies in the run, of which its recipe must go on to tell."""
    return any((road.run.checkpoints(stage) / "last").exists() for stage in _TRAINING)


def _chosen(recipe: Recipe, until: str | None, start: str | None) -> list[RoadStage]:
    stages = [stage for stage in STAGES if stage.name != "sft" or recipe.sft is not None]
    names = [stage.name for stage in stages]
    for option, name in (("--until", until), ("--from", start)):
        if name is not None and name not in names:
            hint = " (the recipe has no sft part)" if name == "sft" else ""
            raise UserError(f"{option} {name}: this recipe's stages are {', '.join(names)}{hint}")
    if until is not None and start is not None and names.index(start) > names.index(until):
        raise UserError(f"--from {start} comes after --until {until}")
    return stages[: names.index(until) + 1] if until is not None else stages


def _discard(road: Road, start: str) -> None:
    names = [stage.name for stage in STAGES]
    for name in names[names.index(start) :]:
        # a stage that is half deleted must not look finished
        (road.folder(name) / "manifest.json").unlink(missing_ok=True)
        if road.folder(name).exists():
            shutil.rmtree(road.folder(name))


def _bring_up_to_date(road: Road, stage: RoadStage) -> bool:
    """Whether there was anything to do."""
    record = road.run.stage(stage.name)

    def inputs_of_work() -> dict[str, str] | None:
        inputs = stage.inputs(road)
        road.fingerprints.save()
        changed = record.changed_inputs(inputs)
        missing = [name for name in stage.outputs if not (record.path / name).exists()]
        if changed == [] and not missing:
            return None
        why = f" (changed: {', '.join(changed)})" if changed else ""
        road.listener.say(f"[{stage.name}]{why}")
        return inputs

    inputs = road.ranks.by_first(inputs_of_work)
    if inputs is None:
        return False
    device = partial(training.device_used, road, stage.name)
    recorded = record.record(inputs, code_version=__version__, seed=road.seed(stage.name), device=device)
    with recorded if road.ranks.is_first else nullcontext():
        if stage.on_all_ranks:
            stage.work(road)
        else:
            road.ranks.by_first(lambda: stage.work(road))
    return True
