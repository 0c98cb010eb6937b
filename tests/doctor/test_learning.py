"""The loss probes pass, and a label shift that is left out, done twice, or a loss that teaches nothing fails them."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

from modicum.doctor.learning import NANO, overfit, untrained_loss
from modicum.train.loss import SupervisedLoss

CPU = torch.device("cpu")


def plant(monkeypatch, by):
    """A loss whose targets lie `by` places too far ahead: -1 is a shift left out, 1 one done twice."""

    def wrong(self, batch):
        logits = self.model(batch.ids[:, :-1], positions=batch.positions, documents=batch.documents)
        targets = batch.ids.roll(-by, dims=1)[:, 1:]
        return cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")

    monkeypatch.setattr(SupervisedLoss, "__call__", wrong)


def test_a_sound_loss_passes_both_probes():
    untrained, learnt = untrained_loss(NANO, CPU), overfit(CPU)
    assert (untrained.outcome, learnt.outcome) == ("ok", "ok")
    assert "ln(256) and half the variance of fresh logits are 5.558" in untrained.detail


def test_weights_that_begin_large_are_no_fault_of_the_loss():
    wide = replace(NANO, initializer_range=0.15, tie_word_embeddings=False)
    assert untrained_loss(wide, CPU).outcome == "ok"


def test_the_planted_loss_is_the_true_one_but_for_its_shift(monkeypatch):
    plant(monkeypatch, 0)
    assert (untrained_loss(NANO, CPU).outcome, overfit(CPU).outcome) == ("ok", "ok")


@pytest.mark.parametrize("by", [-1, 1])
def test_a_wrong_label_shift_is_learnt_by_heart_and_still_found(monkeypatch, by):
    plant(monkeypatch, by)
    finding = overfit(CPU)
    assert finding.outcome == "failed"
    assert "next tokens by heart" in finding.detail


def test_a_label_shift_left_out_shows_in_the_untrained_loss(monkeypatch):
    plant(monkeypatch, -1)
    assert untrained_loss(NANO, CPU).outcome == "failed"


def test_a_loss_summed_twice_shows_in_the_untrained_loss(monkeypatch):
    honest = SupervisedLoss.__call__
    monkeypatch.setattr(SupervisedLoss, "__call__", lambda self, batch: 2 * honest(self, batch))
    assert untrained_loss(NANO, CPU).outcome == "failed"


def test_a_gradient_that_points_nowhere_shows_when_one_batch_is_not_learnt(monkeypatch):
    honest = SupervisedLoss.__call__
    monkeypatch.setattr(SupervisedLoss, "__call__", lambda self, batch: 0 * honest(self, batch) + 5.0)
    finding = overfit(CPU)
    assert finding.outcome == "failed"
    assert "only to" in finding.detail
