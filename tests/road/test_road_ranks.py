"""The road walked by ranks: one prepares, all train, one measures, and everything is said once."""

import json
import os
import subprocess
import sys

import pytest

from modicum.checkpoint import load_checkpoint
from modicum.recipe import load_recipe
from modicum.road.plan import plan
from modicum.road.start import check_ranks
from modicum.store import UserError
from modicum.train import read_metrics


def torchrun(count, *arguments):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={count}",
        "-m",
        "modicum",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, *map(str, arguments)], capture_output=True, text=True, check=False, env=environment, timeout=280
    )


def test_a_batch_that_ranks_cannot_share_is_refused_for_every_stage_at_once(tiny):
    recipe = load_recipe(tiny())
    check_ranks(recipe, 4)
    with pytest.raises(UserError) as told:
        check_ranks(recipe, 3)
    assert [line.split(":")[0] for line in str(told.value).splitlines()] == ["pretrain.batch_size", "sft.batch_size"]
    with pytest.raises(UserError, match="cannot be shared evenly by 3 ranks"):
        plan(recipe, measure=False, chip="h100", gpus=3)


@pytest.mark.slow
def test_two_ranks_go_the_whole_road_and_speak_with_one_voice(tiny):
    path = tiny(pretrain={"parallel": "fsdp"})
    answer = torchrun(2, "run", path)
    assert answer.returncode == 0, answer.stderr
    stages = [line for line in answer.stderr.splitlines() if line.startswith("[")]
    assert stages == [
        f"[{name}]" for name in ("corpus", "tokenizer", "shards", "pretrain", "sft", "evaluate", "report")
    ]
    assert answer.stdout.count("held-out bits per byte") == 1
    run = path.parent / "runs" / "tiny"
    assert [record["step"] for record in read_metrics(run / "pretrain" / "metrics.jsonl")] == [1, 2, 4, 4]
    last = load_checkpoint(run / "sft" / "checkpoints" / "last")
    assert last.training.state["choices"]["ranks"] == 2
    assert json.loads((run / "pretrain" / "manifest.json").read_text())["device"] == "cpu"
    again = torchrun(2, "run", path)
    assert again.returncode == 0, again.stderr
    assert again.stderr.count("everything is up to date") == 1


@pytest.mark.slow
def test_what_the_user_must_mend_is_said_once(tiny):
    answer = torchrun(3, "pretrain", tiny())
    errors = [line for line in answer.stderr.splitlines() if line.startswith("error: ")]
    assert answer.returncode != 0
    assert len(errors) == 2  # of pretrain and of sft
    assert "Traceback (most recent call last):\n  File" not in answer.stderr.split("torch/distributed")[0]
