"""Checkpoints that a plan counts against those that the trainer's own rules leave on the disk."""

import pytest

from modicum.checkpoint import mark_best, point, prune
from modicum.checkpoint.save import step_folder
from modicum.recipe.settings import PretrainSettings
from modicum.road.disk import checkpoints_kept, saved_steps


def most_at_once(root, settings, steps, best_looks):
    """Save, mark and prune as training does; returns the most checkpoints that lay there after any pruning."""
    most = 0
    for step in range(1, steps + 1):
        if step % settings.checkpoint_every_steps and step != steps and step not in best_looks:
            continue
        assert step in saved_steps(settings, steps)
        folder = step_folder(root, step)
        folder.mkdir(parents=True)
        point(root / "last", folder)
        if step in best_looks:
            mark_best(root, folder)
        prune(root, keep_last=settings.keep_last, keep_every_steps=settings.keep_every_steps)
        most = max(most, sum(1 for _ in root.glob("step-*")))
    return most


@pytest.mark.parametrize(
    ("changes", "steps", "best_looks", "exact"),
    [
        ({"keep_last": 2}, 1000, {100}, True),  # the best lies far behind the newest
        ({"keep_last": 2}, 1000, {1000}, False),  # the best is the newest
        ({"keep_last": 3, "keep_every_steps": 200}, 1000, {100}, False),
        ({"keep_last": 9}, 250, {100, 200}, True),  # fewer saves than may stay
        ({"keep_last": 5, "evaluate_every_steps": 20, "checkpoint_every_steps": 300}, 100, {20, 40, 60, 80}, True),
    ],
)
def test_a_plan_counts_at_least_the_checkpoints_that_stay(tmp_path, changes, steps, best_looks, exact):
    settings = PretrainSettings(**{"evaluate_every_steps": 100, "checkpoint_every_steps": 100, **changes})
    planned, found = checkpoints_kept(settings, steps), most_at_once(tmp_path, settings, steps, best_looks)
    assert planned == found if exact else planned >= found
