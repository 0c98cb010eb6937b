"""Ranks that come, go and die: the run goes on from its newest checkpoint, whatever their number."""

import os
import signal
import time

import pytest
import rank_runs
from launching import largest_difference, losses, run_ranks, start_ranks, step
from training_runs import digests

from modicum.train import ALONE

SIZE = {"hidden_size": 64, "intermediate_size": 128}


def when(ready, process, seconds=120):
    """Wait until `ready` says so, while the process runs."""
    end = time.monotonic() + seconds
    while not ready():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.02)


def pid_of(out, rank):
    return int((out / f"pid-{rank}").read_text())


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "tolerance"), [("adamw", 1e-5), ("muon", 5e-4)])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_then_four_then_one_have_the_losses_of_one_process(
    prepared_data, tmp_path, parallel, optimizer, tolerance
):
    whole, first, second, third = (tmp_path / name for name in ("whole", "two", "four", "one"))
    # 50 rows do not divide by four ranks
    size = {"hidden_size": 64, "intermediate_size": 50}
    run = {"steps": 12, "parallel": parallel, "optimizer": optimizer, "size": size}
    rank_runs.job(prepared_data, whole, ALONE, **run)
    run_ranks(2, prepared_data, {first: run})
    run_ranks(4, prepared_data, {second: {**run, "begin_with": str(step(first, 4))}})
    rank_runs.job(prepared_data, third, ALONE, **run, begin_with=step(second, 8))
    expected = losses(whole)
    for out in (first, second, third):
        found = losses(out)
        assert largest_difference(found, {key: expected[key] for key in found}) < tolerance
    assert min(number for _, number in losses(second)) == 5
    assert min(number for _, number in losses(third)) == 9


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_muon_in_bf16_ends_where_one_process_does_on_more_ranks_than_it_has_layers(prepared_data, tmp_path, parallel):
    run = {"steps": 60, "optimizer": "muon", "dtype": "bfloat16", "size": SIZE, "parallel": parallel}
    rank_runs.job(prepared_data, tmp_path / "one", ALONE, **run)
    run_ranks(4, prepared_data, {tmp_path / "four": run})
    expected, found = losses(tmp_path / "one"), losses(tmp_path / "four")
    assert found["heldout", 60] == pytest.approx(expected["heldout", 60], rel=5e-3)
    assert found["train", 60] == pytest.approx(expected["train", 60], rel=5e-3)
    assert expected["heldout", 60] < expected["heldout", 4] - 1


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_compiled_ranks_have_the_losses_of_one_eager_process(prepared_data, tmp_path, parallel, checkpointing):
    run = {"steps": 4, "length": 160}
    rank_runs.job(prepared_data, tmp_path / "one", ALONE, **run)
    compiled = {**run, "compile": "on", "parallel": parallel, "checkpointing": checkpointing}
    run_ranks(2, prepared_data, {tmp_path / "two": compiled})
    assert largest_difference(losses(tmp_path / "two"), losses(tmp_path / "one")) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("rank", [0, 1])
def test_after_a_rank_is_killed_torchrun_starts_all_again_and_the_run_ends_bit_for_bit(
    prepared_data, tmp_path, parallel, rank
):
    run = {"parallel": parallel, "dropout": 0.2}
    run_ranks(2, prepared_data, {tmp_path / "whole": run})
    out = tmp_path / "killed"
    process = start_ranks(
        2, prepared_data, {out: {**run, "seconds": 0.3}}, "--max-restarts=1", "--monitor-interval=0.2"
    )
    when((step(out, 4) / "manifest.json").exists, process)
    time.sleep(0.1)  # into the fifth update
    os.kill(pid_of(out, rank), signal.SIGKILL)
    text, _ = process.communicate(timeout=200)
    assert process.returncode == 0, text
    assert digests(step(out, 8)) == digests(step(tmp_path / "whole", 8))
    assert losses(out) == losses(tmp_path / "whole")


@pytest.mark.slow
def test_a_stop_that_one_rank_is_asked_for_is_made_by_all_after_saving(prepared_data, tmp_path):
    process = start_ranks(2, prepared_data, {tmp_path: {"steps": 200, "seconds": 0.2}})
    when((step(tmp_path, 2) / "manifest.json").exists, process)
    os.kill(pid_of(tmp_path, 1), signal.SIGTERM)
    text, _ = process.communicate(timeout=100)
    told = [line for line in text.splitlines() if "told: " in line]
    assert len(told) == 1
    made = int(told[0].split("after update ")[1].split()[0])
    assert 2 <= made < 200
    assert (step(tmp_path, made) / "manifest.json").exists()
    assert f"saved in {step(tmp_path, made)}" in told[0]
