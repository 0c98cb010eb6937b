"""The figures of `bench train`: same network, same targets, right arithmetic, and the shape that --json prints."""

import gc
import importlib.util
import json
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from math import sqrt
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer

from modicum.bench import bench_training
from modicum.bench import training as room
from modicum.bench.matrix_peak import matrix_gflops
from modicum.bench.result import Bench, Row
from modicum.bench.systems import Ours, Peer, parameter_groups
from modicum.bench.training_worker import _batch
from modicum.cli.bench import PresetName
from modicum.cli.bench_table import bench_lines
from modicum.model import Decoder, ModelConfig, training_flops_per_token
from modicum.recipe.presets import PRESETS
from modicum.train import SupervisedLoss

CONFIG = ModelConfig(
    vocab_size=320, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=192, qk_norm=True
)


def row(system="modicum", mode="bfloat16 compile", speed=300.0, memory=100.0):
    return Row(system, mode, speed, speed, speed, 1.0, 0.5, memory)


def test_ratios_are_ours_by_the_peers():
    bench = Bench("", (row(), row("transformers", "float32 eager", 100.0, 400.0)), {"line": "a machine"})
    assert bench.ratios == {
        "tokens_per_s": {"transformers float32 eager": 3.0},
        "peak_rss_mb": {"transformers float32 eager": 0.25},
    }
    (line,) = [line for line in bench_lines(bench) if line.startswith("transformers")]
    assert line.split()[-4:] == ["3.00", "x", "0.25", "x"]


def test_the_peer_learns_from_the_same_targets_on_the_same_network():
    batch = _batch(CONFIG, 2, 16)
    ours = Decoder(CONFIG)
    loss = SupervisedLoss(ours, device=torch.device("cpu"), dtype=torch.float32, compiled=False)
    peer = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG.to_hf()))
    peer.load_state_dict({**ours.state_dict(), "lm_head.weight": ours.model.embed_tokens.weight})
    ids, labels = batch.ids[:, :-1].contiguous(), batch.ids[:, 1:].contiguous()
    theirs = peer(input_ids=ids, labels=labels, shift_labels=labels).loss
    assert float(loss(batch).detach()) / batch.supervised_tokens == pytest.approx(float(theirs.detach()), abs=1e-5)


def test_the_peers_update_moves_all_of_its_weights_and_gives_them_in_our_names():
    learner = Peer(mode="eager").learner(CONFIG, 16, ExitStack())
    assert (learner.mode, learner.dtype) == ("bfloat16 eager", "bfloat16")
    before = {name: weight.clone() for name, weight in learner.weights().items()}
    assert before.keys() == Decoder(CONFIG).state_dict().keys()
    learner.update(_batch(CONFIG, 2, 16), 1e-3)
    assert all(not torch.equal(before[name], weight) for name, weight in learner.weights().items())


def test_a_peer_decays_what_its_own_training_does():
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG.to_hf()))
    decayed, not_decayed = parameter_groups("transformers", model)
    named = dict(model.named_parameters(remove_duplicate=False))
    assert set(decayed["params"]) == {named[name] for name in Trainer.get_decay_parameter_names(None, model)}
    assert {*decayed["params"], *not_decayed["params"]} == set(model.parameters())
    assert not_decayed["weight_decay"] == 0.0
    (everything,) = parameter_groups("litgpt", model)
    assert everything == {"params": list(model.parameters())}


def test_nothing_is_imported_any_more_when_a_peer_that_was_loaded_is_built():
    script = (
        "import sys; from contextlib import ExitStack; from modicum.bench.systems import Peer, ModelConfig\n"
        f"config, peer = ModelConfig(**{vars(CONFIG)!r}), Peer(mode='eager')\n"
        "peer.load(config); before = set(sys.modules); peer.learner(config, 16, ExitStack())\n"
        "print([name for name in sys.modules if name not in before and name.startswith('transformers')])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_clock_of_a_race_starts_when_the_peers_package_is_there(monkeypatch, request):
    path = request.config.rootpath / "benchmarks" / "race_leg.py"
    spec = importlib.util.spec_from_file_location("race_leg", path)
    leg = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(leg)
    events = []
    for name in ("open_shards", "WindowRows", "Loader"):
        monkeypatch.setattr(leg, name, lambda *_, **__: None)
    monkeypatch.setattr(leg, "time", SimpleNamespace(perf_counter=lambda: events.append("clock")))
    monkeypatch.setattr(leg, "_learn", lambda *_: [{"tokens": 1, "seconds": 1.0, "loss": 1.0}])
    monkeypatch.setattr(Peer, "load", lambda *_: events.append("load"))
    monkeypatch.setattr(Peer, "learner", lambda *_: events.append("build") or SimpleNamespace(mode="eager"))
    order = {"peer": {}, "config": vars(CONFIG), "shards": "x", "tokenizer_hash": "", "length": 8, "seed": 0, "rows": 1}
    leg.race(order)
    assert events == ["load", "clock", "build"]


def test_speeds_are_medians_and_gflops_follow_from_the_models_arithmetic(monkeypatch):
    def turns(module, orders, *, rounds, say):  # noqa: ARG001
        if module == room._PEAK:
            return {"matrix peak": [{"gflops": {"bfloat16": 2.0, "float32": 1.0}}]}
        answer = {"mode": "bfloat16 compile", "dtype": "bfloat16"}
        slow = {**answer, "seconds": [0.5, 9.0, 0.5], "peak_rss_mb": 5.0}
        fast = {**answer, "seconds": [0.25], "peak_rss_mb": 7.0}
        return {name: [slow, fast] for name in orders}

    monkeypatch.setattr(room, "take_turns", turns)
    found = bench_training(CONFIG, rows=2, length=16, peers=[Peer()], rounds=2)
    first = found.rows[0]
    assert (first.tokens_per_s, first.low, first.high) == (96.0, 64.0, 128.0)
    assert first.peak_rss_mb == 6.0
    assert first.gflops == pytest.approx(96.0 * training_flops_per_token(CONFIG, 16) / 1e9)
    assert first.share_of_peak == pytest.approx(first.gflops / 2.0)
    assert len(found.rows) == 2


def test_ours_is_measured_under_the_trainers_own_settings_until_the_end():
    with ExitStack() as settings:
        Ours("float32").learner(CONFIG, 16, settings)
        gc.collect()
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_machines_peak_is_its_operations_by_the_median_of_the_times(monkeypatch):
    moments = iter([0.0, 0.5, 1.0, 1.25, 2.0, 11.0])  # half a second, a quarter, nine
    monkeypatch.setattr("modicum.bench.matrix_peak.time.perf_counter", lambda: next(moments))
    assert matrix_gflops(64, torch.float32, rows=256, repeats=3) == 2 * 256 * 64 * 256 / 0.5 / 1e9


def test_a_peers_options_need_a_peer_and_presets_are_those_of_recipes():
    command = [sys.executable, "-m", "modicum", "bench", "train", "--peer-mode", "eager"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "need --against" in done.stderr
    assert [preset.value for preset in PresetName] == list(PRESETS)


@pytest.mark.slow
def test_the_verb_prints_the_shape_that_every_bench_keeps():
    command = [
        *[sys.executable, "-m", "modicum", "bench", "train", "--preset", "nano", "--rows", "1", "--length", "32"],
        *["--rounds", "1", "--updates", "1", "--against", "transformers", "--peer-mode", "eager", "--json"],
        *["--activation-checkpointing", "selective"],
    ]
    printed = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert printed.keys() == {"what", "rows", "ratios", "machine"}
    assert [row["system"] for row in printed["rows"]] == ["modicum", "transformers"]
    assert printed["rows"][0]["mode"].endswith("compile, selective activation checkpointing")
    assert printed["rows"][0].keys() >= {"system", "mode", "tokens_per_s", "gflops", "peak_rss_mb"}
    assert printed["ratios"].keys() == {"tokens_per_s", "peak_rss_mb"}


def test_litgpt_begins_as_its_own_pretraining_does():
    """The figures of initialize_weights in litgpt/pretrain.py."""
    pytest.importorskip("litgpt", reason="litgpt's requirements exclude transformers'; it is installed without them")
    config = replace(CONFIG, hidden_size=256, num_hidden_layers=3)
    weights = Peer("litgpt", "eager").learner(config, 16, ExitStack()).weights()
    for name, weight in weights.items():
        if "norm" not in name:
            last = name.endswith(("o_proj.weight", "down_proj.weight"))
            std = 1 / sqrt(256) / 3 if last else sqrt(2 / 5 / 256)
            assert float(weight.std()) == pytest.approx(std, rel=0.02), name


@pytest.mark.parametrize("grouped", [False, True], ids=["a head each", "grouped queries"])
def test_litgpts_weights_in_our_names_predict_the_same(grouped):
    pytest.importorskip("litgpt", reason="litgpt's requirements exclude transformers'; it is installed without them")
    config = replace(CONFIG, num_key_value_heads=2 if grouped else 4)
    batch = _batch(config, 2, 16)
    learner = Peer("litgpt", "eager", "float32").learner(config, 16, ExitStack())
    learner.update(batch, 1e-2)
    ours = Decoder(config)
    ours.load_state_dict(learner.weights())
    loss = SupervisedLoss(ours, device=torch.device("cpu"), dtype=torch.float32, compiled=False)
    expected = float(loss(batch).detach()) / batch.supervised_tokens
    assert learner.update(batch, 0.0) == pytest.approx(expected, abs=1e-5)
