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
from modicum.model import attention as attention_module
from modicum.model.mask import Visibility
from modicum.model.scores import attend_sdpa


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


def test_a_kernel_that_looks_ahead_fails_the_causality_probe(model, monkeypatch):
    def leaking(q, k, v, *, allowed, is_causal, dropout=0.0):  # noqa: ARG001
        return attend_sdpa(q, k, v, allowed=allowed, is_causal=False, dropout=dropout)

    monkeypatch.setattr(attention_module, "attend_sdpa", leaking)
    finding = causality(model)
    assert finding.outcome == "failed"
    assert "sdpa" in finding.detail


def test_training_blocks_that_look_one_token_ahead_fail_the_causality_probe(model, monkeypatch):
    honest = Visibility.allowed

    def leaking(self, start, stop, device):
        allowed = honest(self, start, stop, device)
        return allowed | allowed.roll(1, dims=-1)

    monkeypatch.setattr(Visibility, "allowed", leaking)
    finding = causality(model)
    assert finding.outcome == "failed"
    assert "blocks" in finding.detail


def test_a_cache_whose_pieces_see_each_other_whole_fails_the_causality_probe(model, monkeypatch):
    honest = Visibility.allowed

    def leaking(self, start, stop, device):
        return torch.ones_like(honest(self, start, stop, device)) if self.past else honest(self, start, stop, device)

    monkeypatch.setattr(Visibility, "allowed", leaking)
    assert causality_with_cache(model).outcome == "failed"


def test_a_model_that_ignores_its_input_fails_the_causality_probe(model):
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(0.0)
    assert "nothing was probed" in causality(model).detail


def test_cached_positions_that_are_off_by_one_fail_against_the_full_pass(model, monkeypatch):
    honest = Visibility.positions
    monkeypatch.setattr(Visibility, "positions", lambda self, device: honest(self, device) + (self.past > 0))
    assert cache_against_full(model).outcome == "failed"


def test_documents_that_see_each_other_fail_against_separate_passes(model, monkeypatch):
    honest = Visibility.allowed

    def merged(self, start, stop, device):
        return honest(Visibility(self.past, self.length), start, stop, device)

    monkeypatch.setattr(Visibility, "allowed", merged)
    assert packed_against_separate(model).outcome == "failed"


def test_the_exit_status_says_whose_fault_it_is():
    fine, told = Finding("a", "ok", ""), Finding("b", "told", "")
    ours, yours = Finding("c", "failed", ""), Finding("d", "failed", "", yours=True)
    assert exit_status([fine, told]) == 0
    assert exit_status([fine, yours]) == 2
    assert exit_status([ours, yours]) == 1
