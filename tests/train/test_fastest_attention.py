import json

import numpy as np
import pytest
import torch

from modicum.model import Decoder, ModelConfig
from modicum.store import peak_memory_bytes
from modicum.train import AttentionShape, Wishes, attention, choose, machine
from modicum.train.attention import KERNEL, USUAL_BLOCK, fastest_block
from modicum.train.attention_child import candidates, one_pass

SHAPE = AttentionShape(heads=2, groups=1, width=16, length=300)
SMALL = {"vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """The files of the cache, of which there are none yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return lambda: sorted((tmp_path / "modicum").glob("*"))


@pytest.fixture
def measured(monkeypatch):
    """What was measured so far; whatever it is, blocks of 256 are fastest."""
    found = []

    def measure(shape, dtype, threads):
        found.append((shape, dtype, threads))
        return {0: 0.3, 128: 0.2, 256: 0.1}

    monkeypatch.setattr(attention, "_measured", measure)
    return found


def fastest(shape=SHAPE, dtype=torch.bfloat16, threads=2, said=None):
    return fastest_block(shape, dtype, threads, [].append if said is None else said.append)


def test_the_fastest_is_taken_and_measured_only_once(cache, measured):
    assert [fastest(), fastest()] == [256, 256]
    assert len(measured) == len(cache()) == 1
    assert json.loads(cache()[0].read_text()) == {"0": 0.3, "128": 0.2, "256": 0.1}


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("times", "block"),
    [
        ({0: 0.3, 128: 0.2, 256: 0.1}, 256),
        ({0: 0.1, 128: 0.2, 256: 0.3}, KERNEL),
        ({0: 0.3, 128: 0.100, 256: 0.097}, USUAL_BLOCK),  # within noise
        ({0: 0.3, 128: 0.1, 256: 0.2}, USUAL_BLOCK),
    ],
)
def test_another_than_the_usual_block_must_be_clearly_faster(monkeypatch, times, block):
    monkeypatch.setattr(attention, "_measured", lambda *_: times)
    assert fastest() == fastest() == block


def test_another_shape_dtype_machine_or_number_of_threads_is_measured_for_itself(cache, measured, monkeypatch):
    fastest()
    fastest(AttentionShape(2, 1, 16, 301))
    fastest(dtype=torch.float32)
    fastest(threads=1)
    monkeypatch.setattr(attention, "processor_flags", lambda: frozenset({"another"}))
    fastest()
    assert len(measured) == len(cache()) == 5


@pytest.mark.parametrize(
    "damaged",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        '{"0": 0.1}',
        '{"0": null, "128": 0.1, "256": 0.1}',
        '{"0": "fast", "128": 0.1, "256": 0.1}',
        '{"0": NaN, "128": 0.1, "256": 0.1}',
        '{"0": 0.0, "128": 0.1, "256": 0.1}',
        '{"0": 0.1, "128": 0.2, "256": 0.3, "512": 0.4}',
        "[" * 100_000,
    ],
)
def test_a_damaged_cache_is_measured_again(cache, measured, damaged):
    fastest()
    cache()[0].write_text(damaged)
    assert fastest() == 256
    assert len(measured) == 2
    assert fastest() == 256
    assert len(measured) == 2  # whole again


def test_a_cache_that_cannot_be_written_is_said_and_no_more(monkeypatch, measured, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    said = []
    assert fastest(said=said) == 256
    assert "not kept" in said[-1]
    assert len(measured) == 1


def test_a_user_without_a_home_is_served_all_the_same(monkeypatch, measured):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(attention, "cache_folder", homeless)
    said = []
    assert fastest(said=said) == 256
    assert "XDG_CACHE_HOME" in said[-1]
    assert len(measured) == 1


def test_where_measuring_fails_the_usual_block_is_taken_and_said(cache, monkeypatch):
    monkeypatch.setattr(attention.attention_child, "__name__", "modicum.no_such_module")
    said = []
    assert fastest(said=said) == USUAL_BLOCK
    assert "No module named modicum.no_such_module" in said[-1]
    assert cache() == []


@pytest.mark.usefixtures("cache")
def test_rows_no_longer_than_a_block_take_the_kernel_unmeasured(measured):
    assert fastest(AttentionShape(2, 1, 16, 128)) == KERNEL
    assert not measured


def test_all_candidates_are_really_timed_and_none_of_it_in_this_process(cache):
    before = peak_memory_bytes()
    assert fastest(AttentionShape(2, 1, 16, 200), threads=1) in (KERNEL, 128)
    assert peak_memory_bytes() - before < 20e6
    times = json.loads(cache()[0].read_text())
    assert times.keys() == {"0", "128"}
    assert min(times.values()) > 0


def test_the_candidates_do_the_same(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    slopes = []
    monkeypatch.setattr(torch.Tensor, "backward", lambda out, slope: slopes.append((out * slope).sum().item()))
    for block in candidates(300):
        one_pass(4, 2, 8, 300, torch.float32, block)()
    assert len(slopes) == 3
    np.testing.assert_allclose(slopes, slopes[0], rtol=1e-4)


@pytest.mark.usefixtures("cache")
def test_a_run_keeps_its_attention_and_one_from_before_the_measurement_the_usual_one(measured, monkeypatch):
    monkeypatch.setattr(machine, "compiler_fault", lambda _: None)

    def block(earlier, compile="on"):
        wishes = Wishes("cpu", compile=compile, threads=2)
        return choose(wishes, flops=0.0, earlier=earlier, say=[].append, shape=SHAPE).attention_block

    first = choose(Wishes("cpu", compile="on"), flops=0.0, earlier=None, say=[].append, shape=SHAPE).plain()
    assert first["attention_block"] == 256
    assert block({**first, "attention_block": 0}) == 0
    assert block({name: value for name, value in first.items() if name != "attention_block"}) == USUAL_BLOCK
    assert block(None, compile="off") == USUAL_BLOCK
    assert len(measured) == 1


def test_with_dropout_there_is_nothing_to_choose():
    assert AttentionShape.of(ModelConfig(**SMALL, attention_dropout=0.1), 300) is None
    assert AttentionShape.of(ModelConfig(**SMALL), 300) == AttentionShape(1, 1, 8, 300)


@pytest.mark.parametrize(("block", "length", "expected"), [(0, 8, "sdpa"), (4, 8, "blocks"), (8, 8, "sdpa")])
def test_compiled_training_takes_the_block_that_was_chosen(block, length, expected):
    model = Decoder(ModelConfig(**SMALL))
    model.attention_block = block
    embedded = torch.zeros(1, length, 8)
    assert model._implementation(embedded, None, False) == "sdpa"  # not compiled
    model.model.layers[0]._compiled_call_impl = object()
    assert model._implementation(embedded, None, False) == expected
