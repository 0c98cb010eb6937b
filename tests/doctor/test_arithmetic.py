"""The probes pass on our decoder, and each fails when the fault that it looks for is planted."""

import pytest
import torch

from modicum.doctor.arithmetic import (
    cache_against_full,
    causality,
    causality_with_cache,
    packed_against_separate,
    probe_all,
)
from modicum.doctor.finding import Finding, exit_status
from modicum.model import Decoder, ModelConfig


@pytest.fixture
def model():
    config = ModelConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=256,
        qk_norm=True,
    )
    return Decoder(config)


def test_a_sound_decoder_passes_every_probe_and_keeps_its_mode(model):
    model.train()
    findings = probe_all(model)
    assert [finding.outcome for finding in findings] == ["ok"] * 4
    assert model.training
    assert model.attention_impl == "auto"


def test_a_context_of_two_tokens_is_long_enough_to_probe():
    config = ModelConfig(
        vocab_size=8,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=8,
        max_position_embeddings=2,
    )
    assert [finding.outcome for finding in probe_all(Decoder(config))] == ["ok"] * 4


class Faulty(Decoder):
    """A decoder with one planted fault, at its surface: whichever kernel computes it, this is how it would show."""

    fault = ""

    def forward(self, ids, *, positions=None, documents=None, cache=None):
        if self.fault == "documents merged":
            documents = None
        if self.fault == "positions off by one" and cache is not None and cache.length:
            positions = torch.arange(cache.length, cache.length + ids.shape[1])[None].expand_as(ids) + 1
        logits = super().forward(ids, positions=positions, documents=documents, cache=cache)
        kernel = "cache" if cache is not None else self.attention_impl
        if self.fault == f"{kernel} looks ahead":
            logits = logits + 1e-5 * logits.roll(-1, dims=1)
        return logits


@pytest.fixture
def faulty(model):
    return Faulty(model.config)


def test_the_decoder_that_faults_are_planted_in_is_sound_without_them(faulty):
    assert [finding.outcome for finding in probe_all(faulty)] == ["ok"] * 4


@pytest.mark.parametrize("kernel", ["sdpa", "blocks"])
def test_a_kernel_that_looks_one_token_ahead_fails_and_is_named(faulty, kernel):
    faulty.fault = f"{kernel} looks ahead"
    finding = causality(faulty)
    assert finding.outcome == "failed"
    assert f"({kernel} attention, float32)" in finding.detail


def test_a_leak_in_the_dtype_of_training_alone_fails(faulty, monkeypatch):
    honest = Faulty.forward

    def leaking(self, ids, **arguments):
        logits = honest(self, ids, **arguments)
        return logits + logits.roll(-1, dims=1) if torch.is_autocast_enabled("cpu") else logits

    monkeypatch.setattr(Faulty, "forward", leaking)
    assert "bfloat16" in causality(faulty).detail
    assert causality(faulty).outcome == "failed"


def test_cached_pieces_that_look_ahead_fail(faulty):
    faulty.fault = "cache looks ahead"
    assert causality_with_cache(faulty).outcome == "failed"


def test_cached_positions_that_are_off_by_one_fail_against_the_full_pass(faulty):
    faulty.fault = "positions off by one"
    assert cache_against_full(faulty).outcome == "failed"


def test_documents_that_see_each_other_fail_against_separate_passes(faulty):
    faulty.fault = "documents merged"
    assert packed_against_separate(faulty).outcome == "failed"


def test_a_model_that_ignores_its_input_fails_the_causality_probe(model):
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(0.0)
    assert "nothing was probed" in causality(model).detail


def test_the_exit_status_says_whose_fault_it_is():
    fine, told = Finding("a", "ok", ""), Finding("b", "told", "")
    ours, yours = Finding("c", "failed", ""), Finding("d", "failed", "", yours=True)
    assert exit_status([fine, told]) == 0
    assert exit_status([fine, yours]) == 2
    assert exit_status([ours, yours]) == 1
