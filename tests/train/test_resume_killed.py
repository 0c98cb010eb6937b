"""The promise as it ships: compiled, bf16, all threads, in processes that are really killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import training_runs
from training_runs import digests

from modicum.checkpoint import newest
from modicum.train import read_metrics

STEPS = 12
# wide enough for the block kernel and for threads to share work; dropout is off on the path that ships
SIZE = {"hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 256}


def start(prepared_data, out, **changes):
    settings = {"steps": STEPS, "compile": "on", "dtype": "bfloat16", "size": SIZE, "length": 160, **changes}
    command = [sys.executable, training_runs.__file__, str(prepared_data), str(out), json.dumps(settings)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def finish(process):
    _, errors = process.communicate(timeout=550)
    assert process.returncode == 0, errors.decode()


def kill_when(process, ready):
    """SIGKILL the process as soon as `ready` says so."""
    while process.poll() is None and not ready():
        time.sleep(0.005)
    process.kill()
    _, errors = process.communicate()
    assert process.returncode == -signal.SIGKILL, f"it ended by itself:\n{errors.decode()}"


def steps_logged(out):
    return [record["step"] for record in read_metrics(out / "metrics.jsonl") if record["kind"] == "train"]


def saved(out, step):
    return (out / "checkpoints" / f"step-{step:08d}").exists()


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_killed_runs_on_the_compiled_path_with_all_threads_end_bit_for_bit_where_they_should(
    prepared_data, tmp_path, dropout
):
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    finish(start(prepared_data, straight, dropout=dropout))
    kill_when(start(prepared_data, broken, dropout=dropout), lambda: saved(broken, 2))
    kill_when(start(prepared_data, broken, dropout=dropout), lambda: 6 in steps_logged(broken))
    kill_when(
        start(prepared_data, broken, dropout=dropout),
        lambda: (broken / "checkpoints" / ".tmp-step-00000010").exists() or saved(broken, 10),
    )
    assert newest(broken / "checkpoints").name in ("step-00000008", "step-00000010")
    finish(start(prepared_data, broken, dropout=dropout))
    last = Path("checkpoints") / f"step-{STEPS:08d}"
    assert digests(broken / last) == digests(straight / last)
    assert steps_logged(broken) == steps_logged(straight) == [1, 3, 6, 9, 12]


@pytest.mark.slow
def test_the_compiled_path_is_the_eager_one_within_rounding(prepared_data, tmp_path):
    losses = {}
    for compiled in ("on", "off"):
        finish(start(prepared_data, tmp_path / compiled, compile=compiled, dtype="float32"))
        records = read_metrics(tmp_path / compiled / "metrics.jsonl")
        losses[compiled] = [record["loss"] for record in records]
    assert losses["on"] == pytest.approx(losses["off"], rel=1e-4)


@pytest.mark.slow
def test_equal_compiled_runs_give_equal_bits(prepared_data, tmp_path):
    """Atomic adds in a compiled backward would show here without any resume."""
    found = set()
    for name in ("first", "second", "third"):
        finish(start(prepared_data, tmp_path / name))
        found.add(digests(tmp_path / name / "checkpoints" / "last")["model.safetensors"])
    assert len(found) == 1


@pytest.mark.slow
def test_activation_checkpointing_also_runs_compiled(prepared_data, tmp_path):
    losses = {}
    for what in ("none", "selective", "full"):
        finish(start(prepared_data, tmp_path / what, checkpointing=what))
        losses[what] = [record["loss"] for record in read_metrics(tmp_path / what / "metrics.jsonl")]
    assert losses["selective"] == pytest.approx(losses["none"], rel=1e-3)
    assert losses["full"] == pytest.approx(losses["none"], rel=1e-3)
