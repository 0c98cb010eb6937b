from math import inf, nan

import pytest
import torch
from training_runs import random_batch, small_model

from modicum.data import Batch
from modicum.store import UserError
from modicum.train.loss import SupervisedLoss
from modicum.train.optimizer import Optimizer, OptimizerSettings
from modicum.train.update import make_update


class PlainDescent:
    """Gradient descent under the handle of our optimizers: what a weight moved by is its gradient."""

    def __init__(self, model):
        self.weights = list(model.parameters())
        self._sgd = torch.optim.SGD(self.weights, lr=0.0)
        self.step, self.zero_grad = self._sgd.step, self._sgd.zero_grad

    def set_rate(self, rate):
        self._sgd.param_groups[0]["lr"] = rate


def loss_of(model):
    return SupervisedLoss(model, device=torch.device("cpu"), dtype=torch.float32, compiled=False)


def uneven_batch(vocab_size):
    """Six rows of 1 to 20 supervised targets, each of several documents and a padded tail."""
    rows, length = 6, 20
    supervised = torch.arange(length) < torch.tensor([1, 20, 3, 7, 20, 2])[:, None]
    batch = random_batch(vocab_size, rows, length, seed=3, supervised=supervised)
    documents = (torch.arange(length).expand(rows, length) // 6).int()
    documents = torch.where(torch.arange(length) < 18, documents, -1)
    supervised = batch.supervised.clone()
    supervised[:, 1:] &= documents >= 0
    positions = torch.arange(length).expand(rows, length) % 6
    return Batch(batch.ids, positions, documents, supervised)


def weights_after_descent(tokenizer, batch, micro_batch_size):
    model = small_model(tokenizer)
    optimizer = PlainDescent(model)
    update = make_update(loss_of(model), optimizer, batch, micro_batch_size=micro_batch_size, rate=1.0, clip_norm=inf)
    return update, torch.cat([weight.detach().flatten() for weight in model.parameters()])


@pytest.mark.parametrize("micro_batch_size", [1, 2, 3, 4])
def test_accumulated_gradients_are_those_of_the_large_batch_with_uneven_targets(tokenizer, micro_batch_size):
    batch = uneven_batch(tokenizer.vocab_size)
    whole, expected = weights_after_descent(tokenizer, batch, 6)
    parts, found = weights_after_descent(tokenizer, batch, micro_batch_size)
    assert parts.loss == pytest.approx(whole.loss, rel=1e-5)
    assert parts.targets == whole.targets == batch.supervised_tokens
    assert parts.gradient_norm == pytest.approx(whole.gradient_norm, rel=1e-4)
    assert torch.allclose(found, expected, atol=1e-6)


def test_a_mean_of_means_would_be_seen(tokenizer):
    """What the test above guards against differs by far more than its tolerance."""
    batch = uneven_batch(tokenizer.vocab_size)
    _, expected = weights_after_descent(tokenizer, batch, 6)
    model = small_model(tokenizer)
    for row in range(6):
        one = Batch(*(part[row : row + 1] for part in (batch.ids, batch.positions, batch.documents, batch.supervised)))
        (loss_of(model)(one) / one.supervised_tokens / 6).backward()
    found = torch.cat([(weight - weight.grad).detach().flatten() for weight in model.parameters()])
    assert (found - expected).abs().max() > 1e-3


def test_the_gradient_is_clipped_as_a_whole_after_accumulation_and_reported_before(tokenizer):
    batch = random_batch(tokenizer.vocab_size, 4, 16)
    model = small_model(tokenizer)
    (loss_of(model)(batch) / batch.supervised_tokens).backward()
    norm = torch.cat([weight.grad.flatten() for weight in model.parameters()]).norm()
    before = [weight.detach().clone() for weight in model.parameters()]
    model.zero_grad()
    clip = float(norm) / 10
    optimizer = PlainDescent(model)
    update = make_update(loss_of(model), optimizer, batch, micro_batch_size=2, rate=1.0, clip_norm=clip)
    moved = torch.cat([(old - new.detach()).flatten() for old, new in zip(before, model.parameters(), strict=True)])
    assert update.gradient_norm == pytest.approx(float(norm), rel=1e-4)
    assert float(moved.norm()) == pytest.approx(clip, rel=1e-3)


def test_a_small_gradient_is_not_scaled_up(tokenizer):
    batch = random_batch(tokenizer.vocab_size, 4, 16)
    model = small_model(tokenizer)
    before = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    optimizer = PlainDescent(model)
    update = make_update(loss_of(model), optimizer, batch, micro_batch_size=4, rate=1.0, clip_norm=1e3)
    moved = before - torch.cat([weight.detach().flatten() for weight in model.parameters()])
    assert float(moved.norm()) == pytest.approx(update.gradient_norm, rel=1e-3)


@pytest.mark.parametrize("poison", [nan, inf])
def test_what_is_not_finite_changes_no_weight_and_no_moment(tokenizer, poison):
    model = small_model(tokenizer)
    optimizer = Optimizer(model, OptimizerSettings(), torch.float32)
    with torch.no_grad():
        model.model.norm.weight[0] = poison
    before = [weight.detach().clone() for weight in model.parameters()]
    batch = random_batch(tokenizer.vocab_size, 2, 8)
    update = make_update(loss_of(model), optimizer, batch, micro_batch_size=2, rate=1.0, clip_norm=1.0)
    assert not update.finite
    assert not optimizer.moments(model)
    for old, new in zip(before, model.parameters(), strict=True):
        assert torch.equal(old.nan_to_num(7), new.detach().nan_to_num(7))


def test_a_batch_without_a_target_is_refused(tokenizer):
    model = small_model(tokenizer)
    batch = random_batch(tokenizer.vocab_size, 2, 8, supervised=torch.zeros(2, 8, dtype=torch.bool))
    with pytest.raises(UserError, match="no supervised token"):
        make_update(
            loss_of(model),
            Optimizer(model, OptimizerSettings(), torch.float32),
            batch,
            micro_batch_size=1,
            rate=1.0,
            clip_norm=1.0,
        )


def test_a_micro_batch_without_a_target_is_no_fault(tokenizer):
    supervised = torch.ones(2, 8, dtype=torch.bool)
    supervised[1] = False
    batch = random_batch(tokenizer.vocab_size, 2, 8, supervised=supervised)
    update, _ = weights_after_descent(tokenizer, batch, 1)
    assert update.finite
    assert update.targets == 8


def test_activation_checkpointing_gives_the_same_gradients(tokenizer):
    batch = uneven_batch(tokenizer.vocab_size)
    found = []
    for checkpointing in ("none", "selective", "full"):
        model = small_model(tokenizer)
        model.activation_checkpointing = checkpointing
        loss_of(model)(batch).backward()
        found.append(torch.cat([weight.grad.flatten() for weight in model.parameters()]))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_no_gradient_is_left_for_the_next_update(tokenizer):
    model = small_model(tokenizer)
    batch = random_batch(tokenizer.vocab_size, 2, 8)
    make_update(
        loss_of(model),
        Optimizer(model, OptimizerSettings(), torch.float32),
        batch,
        micro_batch_size=1,
        rate=1e-3,
        clip_norm=1.0,
    )
    assert all(weight.grad is None for weight in model.parameters())
