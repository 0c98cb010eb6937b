import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from training_runs import digests, small_run

from modicum.store import write_manifest
from modicum.train import Intervals, OptimizerSettings, read_metrics
from modicum.train.schedule import Schedule

# Dropout makes the random state matter; checkpoints at even steps, so a stop after 5 updates goes on from 4.
RUN = {"steps": 9, "dropout": 0.2, "intervals": Intervals(log=3, evaluate=4, checkpoint=2, keep_last=10)}
TIMES = {"tokens_per_second", "data_wait_share", "peak_memory_mb", "seconds"}


class Killed(BaseException):
    """Nobody catches this, like a SIGKILL."""


def killed_after(prepared_data, out, updates, **changes):
    def progress(done, *_):
        if done == updates:
            raise Killed

    with pytest.raises(Killed):
        small_run(prepared_data, out, progress=progress, **{**RUN, **changes})


def measured(out):
    """The metrics without what depends on the clock."""
    return [
        {name: value for name, value in record.items() if name not in TIMES}
        for record in read_metrics(out / "metrics.jsonl")
    ]


def weights_digest(result):
    return digests(result.last)["model.safetensors"]


@pytest.fixture(scope="module")
def uninterrupted(prepared_data, tmp_path_factory):
    out = tmp_path_factory.mktemp("uninterrupted")
    return out, digests(small_run(prepared_data, out, **RUN).last)


@pytest.mark.parametrize("updates", [1, 2, 5, 8])
def test_a_killed_and_resumed_run_is_the_uninterrupted_one_bit_for_bit(prepared_data, tmp_path, uninterrupted, updates):
    out, expected = uninterrupted
    killed_after(prepared_data, tmp_path, updates)
    assert digests(small_run(prepared_data, tmp_path, **RUN).last) == expected
    assert measured(tmp_path) == measured(out)


def test_a_run_killed_again_and_again_is_still_the_same(prepared_data, tmp_path, uninterrupted):
    for updates in (3, 5, 7):
        killed_after(prepared_data, tmp_path, updates)
    assert digests(small_run(prepared_data, tmp_path, **RUN).last) == uninterrupted[1]
    keys = [(record["kind"], record["step"]) for record in measured(tmp_path)]
    assert len(keys) == len(set(keys))


def alter(folder, *, tensors=None, state=None):
    """Change a checkpoint's training state and hash it again, as if it had been saved so."""
    if tensors is not None:
        file = folder / "training" / "optimizer.safetensors"
        save_file(tensors(load_file(file)), file)
    if state is not None:
        file = folder / "training" / "state.json"
        file.write_text(json.dumps(state(json.loads(file.read_text()))))
    write_manifest(folder)


def zeroed(pattern):
    return lambda tensors: {
        name: torch.zeros_like(tensor) if re.search(pattern, name) else tensor for name, tensor in tensors.items()
    }


PIECES = {
    "first moment": {"tensors": zeroed(r"\.exp_avg$")},
    "second moment": {"tensors": zeroed(r"\.exp_avg_sq$")},
    "optimizer step": {"tensors": zeroed(r"\.step$")},
    "one moment of one weight": {"tensors": zeroed(r"^model\.norm\.weight\.exp_avg$")},
    "data position": {"state": lambda state: {**state, "data": {**state["data"], "rows": 0}}},
    "random state": {"tensors": lambda tensors: {**tensors, "rng.cpu": torch.Generator().manual_seed(99).get_state()}},
}


@pytest.mark.parametrize("piece", PIECES)
def test_a_resume_without_one_piece_of_the_state_ends_elsewhere(prepared_data, tmp_path, uninterrupted, piece):
    killed_after(prepared_data, tmp_path, 5)
    alter(tmp_path / "checkpoints" / "step-00000004", **PIECES[piece])
    assert weights_digest(small_run(prepared_data, tmp_path, **RUN)) != uninterrupted[1]["model.safetensors"]


def test_altering_nothing_ends_where_it_should(prepared_data, tmp_path, uninterrupted):
    """The six above fail for what they altered, not because something was altered."""
    killed_after(prepared_data, tmp_path, 5)
    alter(tmp_path / "checkpoints" / "step-00000004", tensors=dict, state=dict)
    assert digests(small_run(prepared_data, tmp_path, **RUN).last) == uninterrupted[1]


def test_muon_goes_on_bit_for_bit_and_elsewhere_without_one_of_its_moments(prepared_data, tmp_path):
    run = {**RUN, "optimizer": OptimizerSettings("muon")}
    whole = digests(small_run(prepared_data, tmp_path / "whole", **run).last)
    killed_after(prepared_data, tmp_path / "killed", 5, **run)
    assert digests(small_run(prepared_data, tmp_path / "killed", **run).last) == whole
    for moment in ("momentum_buffer", "exp_avg_sq"):
        killed_after(prepared_data, tmp_path / moment, 5, **run)
        forgotten = zeroed(rf"_proj\.weight\.{moment}$")
        alter(tmp_path / moment / "checkpoints" / "step-00000004", tensors=forgotten)
        assert weights_digest(small_run(prepared_data, tmp_path / moment, **run)) != whole["model.safetensors"]


def test_a_resume_that_seeds_again_ends_elsewhere(prepared_data, tmp_path, uninterrupted, monkeypatch):
    killed_after(prepared_data, tmp_path, 5)
    monkeypatch.setattr("modicum.train.run.restore_random_states", lambda *_: torch.manual_seed(5))
    assert weights_digest(small_run(prepared_data, tmp_path, **RUN)) != uninterrupted[1]["model.safetensors"]


def test_a_resume_whose_schedule_begins_anew_ends_elsewhere(prepared_data, tmp_path, uninterrupted, monkeypatch):
    killed_after(prepared_data, tmp_path, 5)
    rate = Schedule.rate
    monkeypatch.setattr(Schedule, "rate", lambda self, step, total: rate(self, step - 4, total))
    assert weights_digest(small_run(prepared_data, tmp_path, **RUN)) != uninterrupted[1]["model.safetensors"]


def test_the_random_state_of_another_program_does_not_matter(prepared_data, tmp_path, uninterrupted):
    killed_after(prepared_data, tmp_path, 5)
    torch.rand(1000)
    assert digests(small_run(prepared_data, tmp_path, **RUN).last) == uninterrupted[1]


def test_how_often_one_logs_evaluates_and_saves_does_not_change_what_is_learnt(prepared_data, tmp_path, uninterrupted):
    intervals = Intervals(log=1, evaluate=1, checkpoint=7, keep_last=1)
    assert digests(small_run(prepared_data, tmp_path, **{**RUN, "intervals": intervals}).last) == uninterrupted[1]


def test_a_model_that_comes_in_evaluation_mode_is_trained_with_dropout_all_the_same(
    prepared_data, tmp_path, uninterrupted
):
    assert digests(small_run(prepared_data, tmp_path, **RUN, evaluating=True).last) == uninterrupted[1]


def test_a_damaged_newest_checkpoint_is_passed_over(prepared_data, tmp_path, uninterrupted):
    killed_after(prepared_data, tmp_path, 7)
    damaged = tmp_path / "checkpoints" / "step-00000006" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.warns(UserWarning, match=r"step-00000006/model\.safetensors"):
        result = small_run(prepared_data, tmp_path, **RUN)
    assert digests(result.last) == uninterrupted[1]


def test_a_half_written_checkpoint_of_a_killed_save_is_cleared(prepared_data, tmp_path, uninterrupted):
    killed_after(prepared_data, tmp_path, 5)
    partial = tmp_path / "checkpoints" / ".tmp-step-00000005"  # a step that is not saved again
    partial.mkdir()
    (partial / "model.safetensors").write_bytes(b"half")
    assert digests(small_run(prepared_data, tmp_path, **RUN).last) == uninterrupted[1]
    assert not partial.exists()


def test_a_full_disk_during_a_save_costs_only_that_save(prepared_data, tmp_path, uninterrupted, monkeypatch):
    from modicum.train import run as run_module

    save = run_module.save_checkpoint

    def full(root, step, **parts):
        if step == 6:
            raise OSError(28, "No space left on device", str(root))
        return save(root, step, **parts)

    monkeypatch.setattr(run_module, "save_checkpoint", full)
    with pytest.raises(OSError, match="No space"):
        small_run(prepared_data, tmp_path, **RUN)
    monkeypatch.undo()
    assert digests(small_run(prepared_data, tmp_path, **RUN).last) == uninterrupted[1]


def test_another_number_of_threads_goes_on_with_a_warning(prepared_data, tmp_path):
    killed_after(prepared_data, tmp_path, 5)
    folder, here = tmp_path / "checkpoints" / "step-00000004", torch.get_num_threads()
    alter(folder, state=lambda state: {**state, "choices": {**state["choices"], "threads": here + 1}})
    said = []
    assert small_run(prepared_data, tmp_path, **RUN, say=said.append).steps == 9
    assert any("not bit for bit" in line and f"threads {here + 1} -> {here}" in line for line in said)


def test_another_micro_batch_goes_on_with_a_warning_and_differs_by_rounding_alone(prepared_data, tmp_path):
    run = {**RUN, "dropout": 0.0}
    whole = small_run(prepared_data, tmp_path / "whole", **run)
    for size, change in ((2, "micro_batch_size 4 -> 2"), (None, "micro_batch_size 4 -> 6"), (4, None)):
        said, out = [], tmp_path / str(size)
        killed_after(prepared_data, out, 5, **run)
        result = small_run(prepared_data, out, **run, micro_batch_size=size, say=said.append)
        warned = [line for line in said if "not bit for bit" in line]
        assert (result.steps, len(warned)) == (9, change is not None)
        assert change is None or change in warned[0]
        assert result.best_heldout_loss == pytest.approx(whole.best_heldout_loss, rel=1e-4)
        assert (weights_digest(result) == weights_digest(whole)) == (change is None)


def test_an_evaluation_that_draws_random_numbers_does_not_change_what_is_learnt(prepared_data, tmp_path, uninterrupted):
    def heldout():
        torch.rand(10)
        return []

    assert (
        weights_digest(small_run(prepared_data, tmp_path, **RUN, heldout=heldout))
        == (uninterrupted[1]["model.safetensors"])
    )
