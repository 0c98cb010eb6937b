import json

import pytest
import torch

from modicum.model import Decoder, ModelConfig
from modicum.train import AttentionShape, Wishes, attention, choose, machine
from modicum.train.attention import KERNEL, USUAL_BLOCK, fastest_block

SHAPE = AttentionShape(heads=2, groups=1, width=16, length=200)


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "modicum" / "attention.json"


@pytest.fixture
def measured(monkeypatch):
    """The shapes that were measured; whatever they are, blocks of 256 are fastest."""
    found = []

    def measure(shape, dtype, threads):
        found.append((shape, dtype, threads))
        return {"0": 0.3, "128": 0.2, "256": 0.1}

    monkeypatch.setattr(attention, "_measured", measure)
    return found


def fastest(shape=SHAPE, dtype=torch.bfloat16, threads=2, said=None):
    return fastest_block(shape, dtype, threads, [].append if said is None else said.append)


def test_the_fastest_is_taken_and_measured_only_once(cache, measured):
    assert [fastest(), fastest()] == [256, 256]
    assert len(measured) == 1
    assert list(json.loads(cache.read_text()).values()) == [{"0": 0.3, "128": 0.2, "256": 0.1}]


def test_another_shape_dtype_or_number_of_threads_is_measured_for_itself(cache, measured):
    fastest()
    fastest(AttentionShape(2, 1, 16, 300))
    fastest(dtype=torch.float32)
    fastest(threads=1)
    assert len(measured) == 4
    assert len(json.loads(cache.read_text())) == 4


@pytest.mark.parametrize("damaged", ["", "{", "[]", "null", '{"a": 3}', '{"a": {"nine": 1.0}}'])
def test_a_damaged_cache_is_measured_again(cache, measured, damaged):
    cache.parent.mkdir()
    cache.write_text(damaged)
    assert fastest() == 256
    assert len(measured) == 1
    assert len(json.loads(cache.read_text())) == 1


@pytest.mark.usefixtures("measured")
def test_a_cache_that_cannot_be_written_is_said_and_no_more(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    said = []
    assert fastest(said=said) == 256
    assert "not kept" in said[-1]


def test_where_compiling_fails_the_usual_block_is_taken_and_said(cache, monkeypatch):
    def fail(*_):
        raise OSError("no compiler")

    monkeypatch.setattr(attention, "_measured", fail)
    said = []
    assert fastest(said=said) == USUAL_BLOCK
    assert "not measured" in said[-1]
    assert not cache.exists()


@pytest.mark.usefixtures("cache")
def test_rows_no_longer_than_a_block_take_the_kernel_unmeasured(measured):
    assert fastest(AttentionShape(2, 1, 16, 128)) == KERNEL
    assert not measured


def test_all_candidates_are_really_timed(cache):
    assert fastest(threads=1) in (0, 128)
    (times,) = json.loads(cache.read_text()).values()
    assert times.keys() == {"0", "128"}
    assert min(times.values()) > 0


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


@pytest.mark.parametrize(("block", "length", "expected"), [(0, 8, "sdpa"), (4, 8, "blocks"), (8, 8, "sdpa")])
def test_compiled_training_takes_the_block_that_was_chosen(block, length, expected):
    model = Decoder(
        ModelConfig(vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    )
    model.attention_block = block
    embedded = torch.zeros(1, length, 8)
    assert model._implementation(embedded, None, False) == "sdpa"  # not compiled
    model.model.layers[0]._compiled_call_impl = object()
    assert model._implementation(embedded, None, False) == expected
