"""The trial: real updates in a process of its own, and one line for the user where they fail."""

import io
import json
from dataclasses import asdict

import pytest
import torch
from plan_trials import CONFIG

from modicum.model import Decoder
from modicum.road.trial import main as trial_process
from modicum.road.trial import measure, synthetic_batch, try_updates
from modicum.store import UserError
from modicum.train import Wishes


def test_the_trials_masks_are_those_of_packed_text():
    batch = synthetic_batch(CONFIG, rows=2, length=10)
    assert batch.documents[0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert batch.positions[1].tolist() == [0, 1] * 5
    assert not batch.supervised[:, 0].any()
    assert batch.supervised[:, 1:].all()


def test_a_trial_measures_real_updates_in_a_process_of_its_own():
    wishes = Wishes(device="cpu", dtype="float32", compile="off", threads=1)
    found = try_updates(CONFIG, rows=2, length=64, wishes=wishes, optimizer="muon", flops=0.0)
    assert (found.rows, found.length, found.choices["dtype"]) == (2, 64, "float32")
    assert found.peak_bytes >= found.program_bytes > 50_000_000
    assert 0 < found.update_seconds < 60
    assert found.score_seconds > 0
    assert found.decode_seconds > 0


def test_the_evaluation_is_timed_on_the_cpu_where_the_run_evaluates(monkeypatch):
    moves = []
    move = Decoder.cpu
    monkeypatch.setattr(Decoder, "cpu", lambda model: moves.append("cpu") or move(model))
    monkeypatch.setattr("modicum.road.trial.peak_memory_bytes", lambda: len(moves))
    monkeypatch.setattr("modicum.road.trial._score_seconds", lambda *_: len(moves))
    monkeypatch.setattr("modicum.road.trial._decode_seconds", lambda _: len(moves))
    wishes = Wishes(device="cpu", dtype="float32", compile="off", threads=1)
    found = measure(CONFIG, rows=1, length=8, wishes=wishes, optimizer="adamw", flops=0.0)
    assert (found.peak_bytes, found.score_seconds, found.decode_seconds) == (0, 1, 1)


def test_a_trial_for_which_the_device_is_too_small_says_so(monkeypatch, capsys):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    order = {"config": asdict(CONFIG), "rows": 8, "length": 64, "wishes": asdict(Wishes())}
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(order)))
    monkeypatch.setattr("modicum.road.trial.measure", full)
    with pytest.raises(SystemExit) as ended:
        trial_process()
    assert ended.value.code == 2
    assert "8 x 64 tokens takes more memory than the device has free; make micro_batch_size" in capsys.readouterr().err


def test_a_trial_that_the_user_can_mend_says_how():
    with pytest.raises(UserError, match="device cuda"):
        try_updates(CONFIG, rows=1, length=8, wishes=Wishes(device="cuda", compile="off"), optimizer="adamw", flops=0.0)


def test_a_trial_that_is_killed_is_told_as_too_little_memory(monkeypatch):
    class Killed:
        returncode = -9

    monkeypatch.setattr("modicum.road.trial.subprocess.run", lambda *_, **__: Killed())
    with pytest.raises(UserError, match=r"killed .signal 9.*micro_batch_size"):
        try_updates(CONFIG, rows=1, length=8, wishes=Wishes(), optimizer="adamw", flops=0.0)
