"""A run that is killed thirty times ends with the same bytes as one that was never killed.

On the shipped path: compiled, bf16 where there is any, every thread of the machine, real processes, SIGKILL.
"""

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from modicum.recipe import load_recipe
from modicum.store import hash_file

SCRIPT = Path(__file__).with_name("kill_at.py")
# The steps of a save, in their order. Each is a function that ends with something on the disk.
SAVE = {
    "weights": "modicum.checkpoint.save:save_file",
    "state": "modicum.checkpoint.save:write_json",
    "manifest": "modicum.checkpoint.save:write_manifest",
    "rename": "modicum.store.atomic:replace_directory",
    "last link": "modicum.checkpoint.save:point",
    "prune": "modicum.train.run:prune",
}
UPDATE = "modicum.train.run:make_update"
BEFORE_TRAINING = [
    ("corpus", "modicum.corpus.prepare:finish_corpus", 1),
    ("corpus", "modicum.corpus.prepare:write_manifest", 1),
    ("tokenizer", "modicum.road.prepare:train_tokenizer", 1),
    ("tokenizer", "modicum.tokenizer.tokenizer:Tokenizer.save", 1),
    ("shards", "modicum.road.prepare:write_shards", 1),
    ("shards", "modicum.road.prepare:write_shards", 2),
    ("shards", "modicum.store.manifest:write_json", 1),
]
AFTER_TRAINING = [
    ("evaluate", "modicum.road.measure:multiple_choice", 1),
    ("evaluate", "modicum.road.measure:answer_quality", 1),
    ("report", "modicum.road.report.write:write_json", 1),
]


def kills(draw):
    """(where, function, call, moment) of every kill, in the order of the road."""

    def training(stage):
        updates = [(f"{stage} update, kill {kill}", UPDATE, draw.randint(1, 5)) for kill in range(4)]
        saves = [(f"{stage} save: {name}", function, draw.randint(1, 2)) for name, function in SAVE.items()]
        mixed = [*updates, *saves]
        draw.shuffle(mixed)
        return mixed

    planned = [*BEFORE_TRAINING, *training("pretrain"), *training("sft"), *AFTER_TRAINING]
    return [(*kill, draw.choice(["before", "after"])) for kill in planned]


def modicum(*arguments):
    return subprocess.run([sys.executable, "-m", "modicum", *map(str, arguments)], capture_output=True, text=True)


def results(recipe):
    """SHA-256 of what a run leaves behind."""
    run = recipe.run_folder
    return {
        f"{stage}/{name}": hash_file(run / stage / "checkpoints" / "last" / name)
        for stage in ("pretrain", "sft")
        for name in ("model.safetensors", "training/optimizer.safetensors")
    }


@pytest.mark.slow
def test_thirty_kills_change_no_bit(tiny, tmp_path):
    training = {"compile": "on", "dtype": "auto", "checkpoint_every_steps": 3, "evaluate_every_steps": 6}
    path = tiny(
        model={"attention_dropout": 0.1},
        pretrain={**training, "steps": 40},
        sft={**training, "epochs": 30},
    )
    answer = modicum("run", path, "--set", "name=whole")
    assert answer.returncode == 0, answer.stderr
    expected = results(load_recipe(path, ["name=whole"]))

    landed = set()
    planned = kills(random.Random(0))
    assert len(planned) >= 30
    for number, (where, function, call, moment) in enumerate(planned):
        note = tmp_path / f"kill-{number}"
        stage = where.split()[0]
        until = ["--until", stage]
        command = [sys.executable, SCRIPT, function, call, moment, note, "--", "run", path, *until]
        answer = subprocess.run([str(part) for part in command], capture_output=True, text=True)
        assert answer.returncode in (0, -signal.SIGKILL), (where, answer.stderr)
        if note.exists():
            landed.add(where)
    wanted = {where for where, *_ in planned}
    assert landed == wanted, f"no kill landed in {wanted - landed}"

    answer = modicum("run", path)
    assert answer.returncode == 0, answer.stderr
    assert results(load_recipe(path)) == expected
