"""Two ranks learn what one process learns, and either goes on where the other stood."""

from itertools import product

import pytest
import rank_runs
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from launching import largest_difference, losses, run_ranks, start_ranks, step
from safetensors.torch import load_file
from training_runs import digests

from modicum.train import ALONE, Ranks, read_metrics
from modicum.train.ranks import _is_lost_connection

ENGINES = ("ddp", "fsdp")
# Muon brings small singular values up to 77 times nearer to the large ones, and with them what differs in a last bit.
TOLERANCE = {"adamw": 1e-5, "muon": 5e-4}


@pytest.fixture(scope="module")
def alone(prepared_data, tmp_path_factory):
    """Runs of one process, by optimizer."""
    folder = tmp_path_factory.mktemp("alone")
    for kind in TOLERANCE:
        rank_runs.job(prepared_data, folder / kind, ALONE, optimizer=kind)
    return folder


@pytest.fixture(scope="module")
def together(prepared_data, tmp_path_factory, alone):
    """Runs of two ranks."""
    folder = tmp_path_factory.mktemp("together")
    jobs = {}
    for parallel, kind in product(ENGINES, TOLERANCE):
        settings = {"parallel": parallel, "optimizer": kind}
        jobs[folder / f"{parallel}-{kind}"] = settings
        jobs[folder / f"{parallel}-from-one-{kind}"] = {**settings, "begin_with": str(step(alone / kind, 4))}
    for parallel in ENGINES:
        drops = {"parallel": parallel, "optimizer": "muon", "dropout": 0.2}
        jobs[folder / f"{parallel}-drops"] = drops
        jobs[folder / f"{parallel}-drops-again"] = {**drops, "begin_with": str(step(folder / f"{parallel}-drops", 4))}
    run_ranks(2, prepared_data, jobs)
    return folder


@pytest.mark.parametrize("kind", TOLERANCE)
@pytest.mark.parametrize("parallel", ENGINES)
def test_two_ranks_have_the_losses_of_one_process(alone, together, parallel, kind):
    found, expected = losses(together / f"{parallel}-{kind}"), losses(alone / kind)
    assert largest_difference(found, expected) < TOLERANCE[kind]
    assert expected["train", 8] < expected["train", 1] - 0.5  # there was something to differ in


@pytest.mark.parametrize("parallel", ENGINES)
def test_figures_are_those_of_all_ranks(alone, together, parallel):
    for found, expected in zip(
        read_metrics(together / f"{parallel}-adamw" / "metrics.jsonl"),
        read_metrics(alone / "adamw" / "metrics.jsonl"),
        strict=True,
    ):
        for name in ("step", "kind", "tokens", "epochs", "targets", "learning_rate"):
            assert found.get(name) == expected.get(name)
        assert found.get("gradient_norm", 0.0) == pytest.approx(expected.get("gradient_norm", 0.0), rel=1e-3)


@pytest.mark.parametrize("kind", TOLERANCE)
@pytest.mark.parametrize("parallel", ENGINES)
def test_a_checkpoint_does_not_show_how_many_wrote_it(alone, together, parallel, kind):
    ours, theirs = step(together / f"{parallel}-{kind}", 8), step(alone / kind, 8)
    assert {file.relative_to(ours) for file in ours.rglob("*")} == {
        file.relative_to(theirs) for file in theirs.rglob("*")
    }
    for name in ("model.safetensors", "training/optimizer.safetensors"):
        found, expected = load_file(ours / name), load_file(theirs / name)
        assert found.keys() - {"rng.cpu.1"} == expected.keys()
        assert all(found[key].shape == tensor.shape for key, tensor in expected.items())


@pytest.mark.parametrize("kind", TOLERANCE)
@pytest.mark.parametrize("parallel", ENGINES)
def test_two_ranks_go_on_where_one_process_stood(alone, together, parallel, kind):
    found, expected = losses(together / f"{parallel}-from-one-{kind}"), losses(alone / kind)
    assert found.keys() == {key for key in expected if key[1] > 4}
    assert largest_difference(found, {key: expected[key] for key in found}) < TOLERANCE[kind]


@pytest.mark.parametrize("kind", TOLERANCE)
@pytest.mark.parametrize("parallel", ENGINES)
def test_one_process_goes_on_where_two_ranks_stood(prepared_data, tmp_path, alone, together, parallel, kind):
    begin = step(together / f"{parallel}-{kind}", 4)
    rank_runs.job(prepared_data, tmp_path, ALONE, optimizer=kind, begin_with=begin)
    found, expected = losses(tmp_path), losses(alone / kind)
    assert largest_difference(found, {key: expected[key] for key in found}) < TOLERANCE[kind]


@pytest.mark.parametrize("parallel", ENGINES)
def test_two_ranks_go_on_bit_for_bit_where_they_stood_dropout_and_all(together, parallel):
    whole, again = together / f"{parallel}-drops", together / f"{parallel}-drops-again"
    assert digests(step(again, 8)) == digests(step(whole, 8))


def test_ranks_drop_different_units(together):
    states = load_file(step(together / "ddp-drops", 4) / "training" / "optimizer.safetensors")
    assert not states["rng.cpu"].equal(states["rng.cpu.1"])


def test_a_loss_that_one_rank_finds_infinite_stops_all_with_one_message(prepared_data, tmp_path):
    process = start_ranks(2, prepared_data, {tmp_path: {"poison": 1}})
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert text.count("told: ") == 1
    assert "update 3 was not made, for its loss is inf" in text
    kept = load_file(tmp_path / "not-finite-step-00000003.safetensors")
    assert kept["ids"].shape[0] == 8  # the shares of both
    assert step(tmp_path, 2).exists()


@given(st.integers(0, 20), st.integers(1, 5))
def test_shares_count_each_item_once_and_are_equally_long(items, world_size):
    shares = [list(Ranks(rank, world_size).shares(range(items))) for rank in range(world_size)]
    counted = [item for share in shares for item, counts in share if counts]
    assert sorted(counted) == list(range(items))
    assert len({len(share) for share in shares}) == 1


def test_one_process_meets_nobody():
    assert ALONE.sum(1, 2.5) == [1, 2.5]
    assert ALONE.any(True)
    assert not ALONE.any(False)
    assert ALONE.by_first(lambda: "done") == "done"
    assert ALONE.gather("own") == ["own"]


@pytest.mark.parametrize(
    ("words", "lost"),
    [
        ("[/src/gloo/transport/tcp/pair.cc:544] Connection closed by peer [127.0.0.1]:40118", True),
        ("[/src/gloo/transport/tcp/pair.cc:547] Read error [127.0.0.1]:1: Connection reset by peer", True),
        ("NCCL error: remote process exited or there was a network error, NCCL version 2.29", True),
        ("[/src/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv", False),
        ("NCCL error: unhandled system error, NCCL version 2.29: error while creating shared memory segment", False),
    ],
)
def test_only_a_closed_connection_is_a_lost_rank(words, lost):
    assert _is_lost_connection(dist.DistBackendError(words)) is lost
    assert _is_lost_connection(RuntimeError(words)) is lost
