"""The loss probes pass, and a label shift that is left out, done twice, or a loss that teaches nothing fails them."""

import dataclasses

import pytest
import torch

from modicum.doctor.learning import NANO, overfit, untrained_loss
from modicum.train.loss import SupervisedLoss

CPU = torch.device("cpu")


def shifted(batch, by):
    """The batch whose target at each place is the token `by` places later than it should be."""
    return dataclasses.replace(batch, ids=batch.ids.roll(-by, dims=1))


def plant(monkeypatch, by):
    """Inputs stay as they are, targets are moved by `by` places: a shift left out is -1, one done twice is 1."""
    honest = SupervisedLoss._sum

    def wrong(self, batch, hidden):
        inputs = batch.ids[:, :-1]

        def hidden_of_true_inputs(_, **arguments):
            return hidden(self.model.embed(inputs), **arguments)

        return honest(self, shifted(batch, by), hidden_of_true_inputs)

    monkeypatch.setattr(SupervisedLoss, "_sum", wrong)


def test_a_sound_loss_passes_both_probes():
    untrained, learnt = untrained_loss(NANO, CPU), overfit(CPU)
    assert (untrained.outcome, learnt.outcome) == ("ok", "ok")
    assert "ln(256) is 5.545" in untrained.detail


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
    honest = SupervisedLoss._sum
    monkeypatch.setattr(SupervisedLoss, "_sum", lambda self, batch, hidden: 2 * honest(self, batch, hidden))
    assert untrained_loss(NANO, CPU).outcome == "failed"


def test_a_gradient_that_points_nowhere_shows_when_one_batch_is_not_learnt(monkeypatch):
    honest = SupervisedLoss._sum
    monkeypatch.setattr(SupervisedLoss, "_sum", lambda self, batch, hidden: 0 * honest(self, batch, hidden) + 5.0)
    finding = overfit(CPU)
    assert finding.outcome == "failed"
    assert "only to" in finding.detail
