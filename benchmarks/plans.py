"""What `modicum plan` says of six runs, beside what they then take: seconds and peak memory of pretraining.

    python benchmarks/plans.py recipes/quickstart.yaml --minutes 1.5

Each case changes the recipe's network, batch or optimizer, and makes corpus, tokenizer and shards of its own. It is
tried first at --try-steps, and then planned and run at as many updates as its plan gives --minutes. The plan is made
before the run, in its own process, with the commands a user types.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from modicum.road.machine import describe_machine
from modicum.store import Stage

CASES: dict[str, tuple[str, ...]] = {
    "micro, 16 x 256, Muon": ("model.preset=micro", "pretrain.optimizer=muon"),
    "micro, 32 x 256 in fours": ("model.preset=micro", "pretrain.batch_size=32", "pretrain.micro_batch_size=4"),
    "micro, 4 x 1024, checkpointed": (
        *("model.preset=micro", "model.max_position_embeddings=1024", "pretrain.batch_size=4"),
        *("pretrain.sequence_length=1024", "pretrain.activation_checkpointing=full"),
    ),
    "nano, 16 x 256, fp32, eager": ("model.preset=nano", "pretrain.dtype=float32", "pretrain.compile=off"),
    "mini, 16 x 256": ("model.preset=mini",),
    "cyberslm, 8 x 512": ("model.preset=cyberslm", "pretrain.batch_size=8", "pretrain.sequence_length=512"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--minutes", type=float, default=1.5)
    parser.add_argument("--try-steps", type=int, default=200)
    parser.add_argument("--case", nargs="*", choices=sorted(CASES), default=sorted(CASES))
    parser.add_argument("--json", type=Path, help="also write the figures here")
    given = parser.parse_args()
    rows = [measured(given.recipe, name, given) for name in given.case]
    print("| run | updates | seconds: plan | run | off by | peak MB: plan | run | off by |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['case']} | {row['steps']} | {row['seconds_planned']:.0f} | {row['seconds']:.0f} "
            f"| {off(row['seconds_planned'], row['seconds']):+.0%} | {row['mb_planned']:,.0f} | {row['mb']:,.0f} "
            f"| {off(row['mb_planned'], row['mb']):+.0%} |"
        )
    print(describe_machine().line())
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))


def off(planned: float, taken: float) -> float:
    """How far the plan was from what was taken, as a share of that."""
    return planned / taken - 1


def measured(recipe: Path, name: str, given: argparse.Namespace) -> dict[str, Any]:
    """One case: planned and run, in a folder that is deleted."""
    folder = Path(tempfile.mkdtemp(prefix="modicum-plan-"))
    try:
        usual = ["pretrain.sequence_length=256", "pretrain.optimizer=adamw"]
        settings = [*CASES[name], *usual, f"output={folder}", "name=run"]
        settings = list({setting.split("=")[0]: setting for setting in reversed(settings)}.values())
        modicum("prepare", recipe, settings)
        first = plan_of(recipe, [*settings, f"pretrain.steps={given.try_steps}"])
        steps = max(20, round(given.try_steps * given.minutes * 60 / first["seconds"]["pretrain"]))
        settings.append(f"pretrain.steps={steps}")
        found = plan_of(recipe, settings)
        modicum("pretrain", recipe, settings)
        stage = folder / "run" / "pretrain"
        taken, last = Stage(stage).manifest(), stage / "checkpoints" / "last" / "training" / "state.json"
        if taken is None:
            sys.exit(f"{name}: the run left no manifest")
        row = {
            "case": name,
            "steps": steps,
            "seconds_planned": found["seconds"]["pretrain"],
            "seconds": json.loads(last.read_text())["seconds"],  # without the trial that a run makes before it
            "mb_planned": found["peak_memory_bytes"]["pretrain"] / 1e6,
            "mb": taken.peak_memory_mb,
        }
        print(row, file=sys.stderr, flush=True)
        return row
    finally:
        shutil.rmtree(folder)


def plan_of(recipe: Path, settings: list[str]) -> dict[str, Any]:
    """The plan as `modicum plan --json` prints it."""
    found: dict[str, Any] = json.loads(modicum("plan", recipe, [*settings], "--json"))
    return found


def modicum(verb: str, recipe: Path, settings: list[str], *options: str) -> str:
    """Run the command as a user would; what it printed."""
    command = [sys.executable, "-m", "modicum", verb, str(recipe), *options]
    command += [word for setting in settings for word in ("--set", setting)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    main()
