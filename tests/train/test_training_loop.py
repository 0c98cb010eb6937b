import json
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from training_runs import LENGTH, small_run

from modicum.checkpoint import load_checkpoint
from modicum.model import training_flops_per_token
from modicum.store import UserError
from modicum.train import Intervals, loop, read_metrics
from modicum.train import run as run_module
from modicum.train.loss import SupervisedLoss


def records(out, kind):
    return [record for record in read_metrics(out / "metrics.jsonl") if record["kind"] == kind]


def saved_steps(out):
    return sorted(int(folder.name[5:]) for folder in (out / "checkpoints").glob("step-*"))


def linked(out, name):
    return (out / "checkpoints" / name).readlink().name


@pytest.fixture
def scripted_heldout(monkeypatch):
    """A function that sets what the following evaluations will find."""

    def script(*losses, targets=100):
        left = list(losses)
        monkeypatch.setattr(SupervisedLoss, "mean", lambda *_: (left.pop(0), targets))

    return script


def test_training_lowers_the_loss_and_leaves_metrics_and_checkpoints(prepared_data, tmp_path):
    result = small_run(prepared_data, tmp_path, steps=40, intervals=Intervals(log=10, evaluate=20, checkpoint=20))
    train, heldout = records(tmp_path, "train"), records(tmp_path, "heldout")
    assert [record["step"] for record in train] == [1, 10, 20, 30, 40]
    assert [record["step"] for record in heldout] == [20, 40]
    assert train[-1]["loss"] < train[0]["loss"] - 1
    assert heldout[-1]["loss"] == pytest.approx(result.best_heldout_loss)
    assert heldout[0]["targets"] == 8 * LENGTH
    wanted = {"loss", "learning_rate", "gradient_norm", "tokens_per_second", "data_wait_share", "peak_memory_mb"}
    assert wanted <= train[0].keys()
    assert train[0]["learning_rate"] > 0
    assert train[-1]["tokens"] == result.tokens <= 40 * 6 * LENGTH
    assert result.last == tmp_path / "checkpoints" / "step-00000040"
    assert load_checkpoint(result.last).config.vocab_size == 384


def test_the_reported_loss_is_the_mean_over_all_targets_since_the_line_before(prepared_data, tmp_path):
    small_run(prepared_data, tmp_path / "each", steps=7, intervals=Intervals(log=1))
    small_run(prepared_data, tmp_path / "some", steps=7, intervals=Intervals(log=6))
    each = [record["loss"] for record in records(tmp_path / "each", "train")]
    some = {record["step"]: record["loss"] for record in records(tmp_path / "some", "train")}
    assert some == {1: each[0], 6: pytest.approx(sum(each[1:6]) / 5), 7: each[6]}
    assert abs(some[6] - each[5]) > 0.1


def test_tokens_per_second_are_tokens_over_time_that_went_by(prepared_data, tmp_path, monkeypatch):
    make_update = run_module.make_update

    def slow(*args, **kwargs):
        time.sleep(0.1)
        return make_update(*args, **kwargs)

    monkeypatch.setattr(run_module, "make_update", slow)
    monkeypatch.setattr(SupervisedLoss, "mean", lambda *_: time.sleep(0.5) or (1.0, 1))
    start = time.monotonic()
    result = small_run(prepared_data, tmp_path, steps=6, intervals=Intervals(log=3, evaluate=2, checkpoint=3))
    went_by = time.monotonic() - start
    lines = records(tmp_path, "train")
    spans = [
        (now["tokens"] - before) / now["tokens_per_second"]
        for now, before in zip(lines, [0, *(line["tokens"] for line in lines)], strict=False)
    ]
    assert all(span >= 0.1 * updates for span, updates in zip(spans, [1, 2, 3], strict=True))
    assert sum(spans) <= went_by - 3 * 0.5
    assert sum(spans) + 3 * 0.5 <= result.seconds <= went_by
    later = small_run(prepared_data, tmp_path, steps=7, intervals=Intervals(log=3, evaluate=2, checkpoint=3))
    assert later.seconds >= result.seconds + 0.1 + 0.5


def test_a_long_wait_for_data_is_reported(prepared_data, tmp_path, monkeypatch):
    from modicum.data import Loader

    def late(self):
        time.sleep(0.3)
        self._waited += 0.3
        return original(self)

    original = Loader.__next__
    monkeypatch.setattr(Loader, "__next__", late)
    small_run(prepared_data, tmp_path, steps=3, heldout=None)
    last = records(tmp_path, "train")[-1]
    updates, tokens = 2, last["tokens"] - records(tmp_path, "train")[0]["tokens"]
    assert last["data_wait_share"] * tokens / last["tokens_per_second"] == pytest.approx(updates * 0.3, rel=0.2)


def test_best_points_to_the_lowest_held_out_loss(prepared_data, tmp_path, scripted_heldout):
    scripted_heldout(3.0, 2.0, 2.5, 2.0)
    result = small_run(prepared_data, tmp_path, steps=8, intervals=Intervals(evaluate=2, checkpoint=100, keep_last=1))
    assert linked(tmp_path, "best") == "step-00000004"
    assert (result.best.name, result.best_heldout_loss) == ("step-00000004", 2.0)
    assert saved_steps(tmp_path) == [4, 8]
    assert [record["best"] for record in records(tmp_path, "heldout")] == [True, True, False, False]


def test_best_is_not_moved_to_a_worse_one_after_a_resume(prepared_data, tmp_path, scripted_heldout):
    scripted_heldout(2.0, 3.0)
    small_run(prepared_data, tmp_path, steps=4, intervals=Intervals(evaluate=2, checkpoint=2, keep_last=1))
    scripted_heldout(2.5, 2.2)
    result = small_run(prepared_data, tmp_path, steps=8, intervals=Intervals(evaluate=2, checkpoint=2, keep_last=1))
    assert linked(tmp_path, "best") == "step-00000002"
    assert (result.best.name, result.best_heldout_loss) == ("step-00000002", 2.0)


def test_a_loss_over_other_text_is_not_compared_with_the_best_so_far(prepared_data, tmp_path, scripted_heldout):
    scripted_heldout(2.0, 3.0)
    small_run(prepared_data, tmp_path, steps=4, intervals=Intervals(evaluate=2, checkpoint=2))
    scripted_heldout(2.5, 2.7, targets=900)
    result = small_run(prepared_data, tmp_path, steps=8, intervals=Intervals(evaluate=2, checkpoint=2))
    assert (result.best.name, result.best_heldout_loss) == ("step-00000006", 2.5)


def test_a_kill_between_the_save_and_the_best_link_is_mended_on_resume(prepared_data, tmp_path, scripted_heldout):
    scripted_heldout(3.0, 2.0)
    intervals = Intervals(evaluate=2, checkpoint=2)
    small_run(prepared_data, tmp_path, steps=4, intervals=intervals)
    link = tmp_path / "checkpoints" / "best"
    link.unlink()
    link.symlink_to("step-00000002")
    scripted_heldout(2.5)
    small_run(prepared_data, tmp_path, steps=6, intervals=intervals)
    assert linked(tmp_path, "best") == "step-00000004"


def test_retention_keeps_the_newest_every_nth_and_the_best(prepared_data, tmp_path, scripted_heldout):
    scripted_heldout(1.0, 2.0, 3.0, 4.0, 5.0)
    intervals = Intervals(evaluate=2, checkpoint=1, keep_last=2, keep_every=5)
    small_run(prepared_data, tmp_path, steps=9, intervals=intervals)
    assert saved_steps(tmp_path) == [2, 5, 8, 9]
    assert linked(tmp_path, "last") == "step-00000009"


@pytest.mark.parametrize("fault", [SafetensorError("No space left on device"), OSError("No space left on device")])
def test_a_loss_that_is_not_finite_is_told_of_also_where_its_batch_cannot_be_kept(
    prepared_data, tmp_path, monkeypatch, fault
):
    def full(*given, **_):
        given[1].write_bytes(b"half")
        raise fault

    monkeypatch.setattr("modicum.train.offender.save_file", full)
    monkeypatch.setattr(SupervisedLoss, "__call__", lambda self, batch: self.forward(batch) * float("nan"))
    with pytest.raises(UserError, match=r"update 1 was not made.*could not be kept here \(No space left on device"):
        small_run(prepared_data, tmp_path, steps=2, heldout=None)
    assert not list(tmp_path.glob("not-finite*"))


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_the_run_and_saves_its_batch(prepared_data, tmp_path, monkeypatch, poison):
    original, seen = SupervisedLoss.__call__, []

    def poisoned(self, batch):
        seen.append(batch)
        return original(self, batch) * (poison if len(seen) > 2 * 4 else 1.0)

    monkeypatch.setattr(SupervisedLoss, "__call__", poisoned)
    with pytest.raises(UserError, match=r"not-finite-step-00000005\.safetensors: update 5 was not made") as error:
        small_run(prepared_data, tmp_path, steps=8, heldout=None, intervals=Intervals(checkpoint=3))
    assert "the newest checkpoint before it is" in str(error.value)
    assert "step-00000003" in str(error.value)
    kept = load_file(tmp_path / "not-finite-step-00000005.safetensors")
    assert kept.keys() == {"ids", "positions", "documents", "supervised"}
    assert torch.equal(kept["ids"], torch.cat([seen[8].ids, seen[9].ids]))
    assert saved_steps(tmp_path) == [3]
    weights = load_checkpoint(tmp_path / "checkpoints" / "last").weights
    assert all(weight.isfinite().all() for weight in weights.values())


def test_a_spike_is_a_record_of_its_own(prepared_data, tmp_path, monkeypatch):
    original, calls = SupervisedLoss.__call__, []

    def spiking(self, batch):
        calls.append(0)
        return original(self, batch) * (20.0 if len(calls) in (2 * 14 - 1, 2 * 14) else 1.0)

    monkeypatch.setattr(SupervisedLoss, "__call__", spiking)
    small_run(prepared_data, tmp_path, steps=16, heldout=None)
    (spike,) = records(tmp_path, "spike")
    assert spike["step"] == 14
    assert spike["gradient_norm"] > 4 * spike["median_gradient_norm"]


def test_a_changed_identity_is_refused_with_the_field_and_operating_settings_are_not(prepared_data, tmp_path):
    small_run(prepared_data, tmp_path, steps=4)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match=r"recipe\.learning_rate: was 0\.003, is 0\.001"):
        small_run(prepared_data, tmp_path, steps=6, identity={"recipe": {"learning_rate": 1e-3}})
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    result = small_run(prepared_data, tmp_path, steps=6, intervals=Intervals(log=1, evaluate=3, checkpoint=5))
    assert result.steps == 6


def test_another_model_is_refused(prepared_data, tmp_path):
    small_run(prepared_data, tmp_path, steps=2)
    with pytest.raises(UserError, match=r"config\.json: describes another model"):
        small_run(prepared_data, tmp_path, steps=4, size={"num_hidden_layers": 1})


def test_more_steps_extend_a_run_and_the_schedule_follows_from_there(prepared_data, tmp_path):
    said = []
    small_run(prepared_data, tmp_path, steps=6, intervals=Intervals(log=1))
    small_run(prepared_data, tmp_path, steps=12, intervals=Intervals(log=1), say=said.append)
    assert any("6 updates and is now to have 12" in line for line in said)
    rates = [record["learning_rate"] for record in records(tmp_path, "train")]
    assert rates[5] < rates[6] < rates[0]
    assert all(now > after > 0 for now, after in pairwise(rates[6:]))
    state = json.loads((tmp_path / "checkpoints/last/training/state.json").read_text())
    assert state["totals"] == [[0, 6], [6, 12]]


def test_fewer_steps_than_were_made_are_refused(prepared_data, tmp_path):
    small_run(prepared_data, tmp_path, steps=4)
    with pytest.raises(UserError, match="4 updates were made, and the run is now to have 3"):
        small_run(prepared_data, tmp_path, steps=3)


def test_a_finished_run_is_left_as_it_is(prepared_data, tmp_path):
    first = small_run(prepared_data, tmp_path, steps=4)
    before = {path: path.read_bytes() for path in Path(tmp_path).rglob("*") if path.is_file()}
    assert small_run(prepared_data, tmp_path, steps=4) == first
    assert {path: path.read_bytes() for path in Path(tmp_path).rglob("*") if path.is_file()} == before


def test_too_little_data_is_said_before_the_first_update(prepared_data, tmp_path, monkeypatch):
    from modicum.data import Loader

    def check(_, rows):
        raise UserError(f"{rows} rows are too many")

    monkeypatch.setattr(Loader, "check", check)
    with pytest.raises(UserError, match="600 rows are too many"):
        small_run(prepared_data, tmp_path, steps=100)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_progress_is_told_after_each_update(prepared_data, tmp_path):
    told = []
    small_run(prepared_data, tmp_path, steps=3, progress=lambda *event: told.append(event))
    assert [event[:2] for event in told] == [(1, 3), (2, 3), (3, 3)]
    assert all("loss" in text and "tokens/s" in text for _, _, text in told)


def test_whether_compiling_pays_is_decided_by_the_arithmetic_that_a_plan_counts(prepared_data, tmp_path, monkeypatch):
    asked = []
    honest = loop.choose
    monkeypatch.setattr(loop, "choose", lambda *given, **named: asked.append(named["flops"]) or honest(*given, **named))
    small_run(prepared_data, tmp_path, steps=2, batch_size=6)
    config = load_checkpoint(tmp_path / "checkpoints" / "last").config
    assert asked == [2 * 6 * LENGTH * training_flops_per_token(config, LENGTH)]


def test_a_device_whose_memory_runs_out_is_no_fault_of_ours(prepared_data, tmp_path, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nSee the documentation")

    monkeypatch.setattr("modicum.train.run.make_update", full)
    with pytest.raises(UserError, match=r"memory of the device ran out \(CUDA out of .* 9 GiB\.\); set a smaller"):
        small_run(prepared_data, tmp_path)
