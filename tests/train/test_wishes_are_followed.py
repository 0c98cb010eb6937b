"""What was asked for is what the run really does, not only what it writes down."""

import json

import pytest
import torch
from training_runs import digests, small_run

from modicum.model import block as block_module
from modicum.train import Wishes


def wishes(**changes):
    return Wishes(**{"device": "cpu", "dtype": "float32", "compile": "off", **changes})


def choices(out):
    return json.loads((out / "checkpoints/last/training/state.json").read_text())["choices"]


def test_bf16_trains_other_weights_than_fp32_and_both_are_stored_as_fp32(prepared_data, tmp_path):
    found = {}
    for dtype in ("float32", "bfloat16"):
        out = tmp_path / dtype
        found[dtype] = digests(small_run(prepared_data, out, steps=2, wishes=wishes(dtype=dtype)).last)
        assert choices(out)["dtype"] == dtype
        config = json.loads((out / "checkpoints/last/config.json").read_text())
        assert config.get("dtype", config.get("torch_dtype")) == "float32"
    assert found["float32"]["model.safetensors"] != found["bfloat16"]["model.safetensors"]


def test_the_threads_asked_for_do_the_work(prepared_data, tmp_path):
    seen = []
    before = torch.get_num_threads()
    small_run(
        prepared_data,
        tmp_path,
        steps=1,
        wishes=wishes(threads=before + 1),
        progress=lambda *_: seen.append(torch.get_num_threads()),
    )
    assert seen == [before + 1]
    assert torch.get_num_threads() == before
    assert choices(tmp_path)["threads"] == before + 1


@pytest.mark.parametrize("wish", ["none", "selective", "full"])
def test_activation_checkpointing_reaches_the_layers_and_changes_no_bit(prepared_data, tmp_path, monkeypatch, wish):
    original, calls = block_module.checkpoint, []
    monkeypatch.setattr(
        block_module, "checkpoint", lambda *a, **k: calls.append("context_fn" in k) or original(*a, **k)
    )
    asked = small_run(prepared_data, tmp_path / "asked", steps=2, wishes=wishes(activation_checkpointing=wish))
    assert set(calls) == {"none": set(), "selective": {True}, "full": {False}}[wish]
    plain = small_run(prepared_data, tmp_path / "plain", steps=2, wishes=wishes())
    assert digests(asked.last) == digests(plain.last)


def test_compiled_layers_are_given_back_as_they_were(prepared_data, tmp_path, monkeypatch):
    compiled, loss_class = [], "modicum.train.run.SupervisedLoss"
    from modicum.train.loss import SupervisedLoss

    class Watched(SupervisedLoss):
        def __init__(self, model, *, compiled, **parts):
            seen.append(compiled)
            super().__init__(model, compiled=False, **parts)
            self.layers = model.model.layers
            self.layers[0].compile(backend="eager")

    seen = []
    monkeypatch.setattr(loss_class, lambda *a, **k: compiled.append(Watched(*a, **k)) or compiled[-1])
    monkeypatch.setattr("modicum.train.machine.compiler_fault", lambda _: None)
    small_run(prepared_data, tmp_path, steps=1, wishes=wishes(compile="on"))
    assert seen == [True]
    assert all(layer._compiled_call_impl is None for layer in compiled[0].layers)
