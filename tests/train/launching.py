"""Starting ranks as a user does, with torchrun, and reading what they left."""

import json
import os
import subprocess
import sys
from pathlib import Path

from modicum.train import read_metrics

RANK_RUNS = Path(__file__).with_name("rank_runs.py")


def start_ranks(count, prepared, jobs, *options):
    """torchrun with the jobs of rank_runs.py: folder to settings."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}", *options,
        str(RANK_RUNS), str(prepared), json.dumps({str(out): settings for out, settings in jobs.items()}),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def run_ranks(count, prepared, jobs, *options):
    """Run the jobs to their end, which is a good one."""
    process = start_ranks(count, prepared, jobs, *options)
    text, _ = process.communicate(timeout=280)
    assert process.returncode == 0, text
    return text


def losses(out):
    """Every loss of the run, training and held-out, by kind and step."""
    records = read_metrics(out / "metrics.jsonl")
    found = {(record["kind"], record["step"]): record["loss"] for record in records if "loss" in record}
    assert len(found) == sum("loss" in record for record in records)
    return found


def largest_difference(found, expected):
    """Relative, over losses of the same steps."""
    assert found.keys() == expected.keys()
    return max(abs(found[key] - value) / value for key, value in expected.items())


def step(out, number):
    return out / "checkpoints" / f"step-{number:08d}"
