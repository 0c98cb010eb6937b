"""The report stage: what the page is made from, and making it."""

from modicum import __version__
from modicum.road.context import Road
from modicum.road.measure import RESULTS
from modicum.road.report import write_report
from modicum.store import hash_file


def report_inputs(road: Road) -> dict[str, str]:
    """Everything that the page shows, by hash; so it is made anew when any of it changed."""
    run = road.run.path
    stages = [stage for stage in ("pretrain", "sft") if stage != "sft" or road.recipe.sft is not None]
    files = {
        "evaluate": run / "evaluate" / RESULTS,
        "corpus": run / "corpus" / "text" / "report.json",
        "recipe": road.run.recipe,
        "plan": run / "plan.json",
        **{f"{stage}.metrics": run / stage / "metrics.jsonl" for stage in stages},
        **{f"{stage}.checkpoint": road.run.checkpoints(stage) / "last" / "manifest.json" for stage in stages},
    }
    return {name: hash_file(path) for name, path in files.items() if path.exists()}


def make_report(road: Road) -> None:
    page = write_report(road.run, road.recipe, code_version=__version__)
    road.listener.say(f"report: {page}")
