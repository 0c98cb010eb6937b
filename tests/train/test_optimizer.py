import math

import numpy as np
import pytest
import torch
from torch import nn
from training_runs import random_batch, small_model

from modicum.store import UserError
from modicum.train.loss import SupervisedLoss
from modicum.train.muon import STEPS, Muon, evening, orthogonalized
from modicum.train.optimizer import Optimizer, OptimizerSettings

KINDS = ["adamw", "muon"]
PROJECTIONS = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip
MATRICES = {f"model.layers.{layer}.{part}.weight" for layer in range(2) for part in PROJECTIONS}


def shrunk(model, kind):
    """Names of the weights that an update without a gradient makes smaller, by exactly rate times decay."""
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    optimizer = Optimizer(model, OptimizerSettings(kind, weight_decay=0.5), torch.bfloat16)
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer.set_rate(0.1)
    optimizer.step()
    found = set()
    for name, weight in model.named_parameters():
        if torch.allclose(weight, before[name] * 0.95, rtol=1e-6, atol=0) and before[name].any():
            found.add(name)
        else:
            assert torch.equal(weight, before[name]), name
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_only_matrices_decay_and_neither_norms_nor_biases_nor_embeddings(tokenizer, kind):
    assert shrunk(small_model(tokenizer, attention_bias=True, mlp_bias=True), kind) == MATRICES
    assert shrunk(small_model(tokenizer, qk_norm=True), kind) == MATRICES


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_decays_only_where_it_is_not_the_embedding(tokenizer, kind):
    assert shrunk(small_model(tokenizer, tie_word_embeddings=False), kind) == {*MATRICES, "lm_head.weight"}


def learnt(tokenizer, updates=2, kind="adamw", dtype=torch.bfloat16, **changes):
    model = small_model(tokenizer, **changes)
    optimizer = Optimizer(model, OptimizerSettings(kind), dtype)
    optimizer.set_rate(1e-3)
    loss = SupervisedLoss(model, device=torch.device("cpu"), dtype=torch.float32, compiled=False)
    for seed in range(updates):
        loss(random_batch(tokenizer.vocab_size, 2, 8, seed=seed)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def test_every_weight_is_moved_by_one_of_the_two_and_matrices_by_muon(tokenizer):
    model, optimizer = learnt(tokenizer, kind="muon", attention_bias=True, tie_word_embeddings=False)
    assert sorted(map(id, optimizer.weights)) == sorted(map(id, model.parameters()))
    kept = optimizer.moments(model)
    for name, _ in model.named_parameters():
        wanted = {"momentum_buffer", "exp_avg_sq"} if name in MATRICES else {"exp_avg", "exp_avg_sq", "step"}
        assert {moment.rsplit(".", 1)[1] for moment in kept if moment.rsplit(".", 1)[0] == name} == wanted


@pytest.mark.parametrize(("kind", "factor"), [("adamw", 1.0), ("muon", 4.0)])
def test_what_stands_beside_muon_learns_at_a_multiple_of_the_rate(tokenizer, kind, factor):
    model = small_model(tokenizer, attention_bias=True, tie_word_embeddings=False)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    optimizer = Optimizer(model, OptimizerSettings(kind, weight_decay=0.0, embedding_factor=4.0), torch.bfloat16)
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    optimizer.set_rate(0.01)
    optimizer.step()
    for name, weight in model.named_parameters():
        if name not in MATRICES:  # the first step of AdamW is the rate itself
            assert torch.allclose(before[name] - weight, torch.tensor(0.01 * factor), rtol=1e-3), name


def polar(matrix):
    """U P V^T in float64, with P from the singular values alone, by the quintics one after the other; then
    each row of the length that makes all alike."""
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    x = values / (1.01 * np.linalg.norm(values))
    for a, b, c in STEPS:
        x = a * x + b * x**3 + c * x**5
    found = left * x @ right
    even = found / np.linalg.norm(found, axis=1, keepdims=True)
    return even * np.linalg.norm(found) / np.linalg.norm(even)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_muon_moves_a_matrix_by_its_orthogonalised_gradient_in_adamws_size(tokenizer, dtype, tolerance):
    model = small_model(tokenizer)
    optimizer = Optimizer(model, OptimizerSettings("muon", weight_decay=0.0), dtype)
    optimizer.set_rate(0.01)
    loss = SupervisedLoss(model, device=torch.device("cpu"), dtype=torch.float32, compiled=False)
    loss(random_batch(tokenizer.vocab_size, 4, 16)).backward()
    named = {name: weight for name, weight in model.named_parameters() if name in MATRICES}
    before = {name: (w.detach().double().numpy().copy(), w.grad.double().numpy().copy()) for name, w in named.items()}
    optimizer.step()
    for name, (weight, gradient) in before.items():
        # the first update's direction is the gradient's own, momentum or not; the size is 0.2 sqrt(longer side)
        expected = -0.01 * 0.2 * math.sqrt(max(weight.shape)) * polar(gradient)
        moved = named[name].detach().double().numpy() - weight
        assert np.linalg.norm(moved - expected) < tolerance * np.linalg.norm(expected), name


def test_each_step_of_muon_is_the_odd_quintic_nearest_one_on_what_the_steps_before_leave():
    # Chebyshev: a polynomial of three terms is the nearest where its error swings four times between the same extremes
    low, high = 0.01, 1.0
    for a, b, c in STEPS:
        turns = np.sqrt(np.sort(np.roots([5 * c, 3 * b, a])))
        x = np.array([low, *turns, high])
        swings = a * x + b * x**3 + c * x**5 - 1
        assert np.all(np.diff(x) > 0)
        assert swings == pytest.approx(swings[-1] * np.array([-1, 1, -1, 1]), rel=5e-3)
        low, high = 1 + min(swings), 1 + max(swings)
    assert (low, high) == pytest.approx((0.73, 1.27), abs=0.005)


@pytest.mark.parametrize("shape", [(48, 48), (96, 32), (32, 96), (1, 7), (7, 1)])
@pytest.mark.parametrize("smallest", [0.1, 0.02])
@pytest.mark.parametrize(("dtype", "slack"), [(torch.float32, 1e-4), (torch.bfloat16, 0.15)])
def test_orthogonalising_brings_every_singular_value_near_one(shape, smallest, dtype, slack):
    generator = torch.Generator().manual_seed(0)
    left, _, right = torch.linalg.svd(torch.randn(shape, generator=generator), full_matrices=False)
    values = torch.full((min(shape),), smallest)
    values[0] = 1.0  # near the whole norm, of which the others are a hundredth or more
    found = orthogonalized((left * values @ right).to(dtype))
    assert (found.dtype, found.shape) == (dtype, shape)
    singular = torch.linalg.svdvals(found.float())
    assert singular.min() > 0.73 - slack
    assert singular.max() < 1.27 + slack


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_muon_goes_on_as_torchs_does(dtype):
    generator = torch.Generator().manual_seed(1)
    ours, torchs = (nn.Parameter(torch.ones(24, 16)) for _ in range(2))
    settings = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}
    theirs = torch.optim.Muon([torchs], **settings, adjust_lr_fn="match_rms_adamw")
    movers = Muon([ours], **settings, dtype=dtype), theirs
    for _ in range(6):
        ours.grad = torch.randn(24, 16, generator=generator)
        torchs.grad = ours.grad.clone()
        for mover in movers:
            mover.step()
    # momentum and decay are the same; the singular values of an update are only nearly one, each in its own way, and
    # its rows are of one length here alone
    buffers = [mover.state[weight]["momentum_buffer"] for mover, weight in zip(movers, (ours, torchs), strict=True)]
    assert torch.equal(*buffers)
    assert (ours - torchs).norm() < 0.25 * (torchs - 1).norm()


def test_evening_gives_rows_the_length_that_others_had_lately_and_keeps_the_norm():
    exp_avg_sq = torch.zeros(2, 1)
    update = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    once = update * evening(update, exp_avg_sq)
    assert once[0].norm() == pytest.approx(once[1].norm())
    assert once.norm() == pytest.approx(update.norm())
    for _ in range(500):
        evening(update, exp_avg_sq)
    # a row that was ten times as long, and is now as the other, is moved a tenth as far
    again = evening(torch.tensor([[0.3, 0.4], [0.3, 0.4]]), exp_avg_sq)
    assert again[1] / again[0] == pytest.approx(10 * math.sqrt(0.95), rel=0.01)
    assert torch.isfinite(evening(torch.zeros(3, 2), torch.zeros(3, 1))).all()


@pytest.mark.parametrize("kind", KINDS)
def test_moments_come_back_as_they_were(tokenizer, kind):
    model, optimizer = learnt(tokenizer, kind=kind)
    saved = {name: tensor.clone() for name, tensor in optimizer.moments(model).items()}
    other, fresh = learnt(tokenizer, updates=0, kind=kind)
    fresh.restore_moments(other, saved, "file")
    restored = fresh.moments(other)
    assert restored.keys() == saved.keys()
    assert all(torch.equal(restored[name], saved[name]) for name in saved)


def test_every_moment_that_is_missing_or_misshapen_is_named(tokenizer):
    model, optimizer = learnt(tokenizer)
    saved = optimizer.moments(model)
    del saved["model.norm.weight.exp_avg"]
    saved["model.embed_tokens.weight.exp_avg_sq"] = torch.zeros(3)
    with pytest.raises(UserError) as error:
        optimizer.restore_moments(model, saved, "optimizer.safetensors")
    assert "optimizer.safetensors: model.norm.weight.exp_avg: missing" in str(error.value)
    assert "model.embed_tokens.weight.exp_avg_sq: has another shape" in str(error.value)


def test_a_moment_of_muon_that_is_missing_or_misshapen_is_named(tokenizer):
    model, optimizer = learnt(tokenizer, kind="muon")
    saved = optimizer.moments(model)
    one, two = (f"model.layers.0.self_attn.{part}_proj.weight.exp_avg_sq" for part in "qk")
    del saved[one]
    saved[two] = torch.zeros(model.get_parameter(two.removesuffix(".exp_avg_sq")).shape)
    with pytest.raises(UserError) as error:
        optimizer.restore_moments(model, saved, "optimizer.safetensors")
    assert f"{one}: missing" in str(error.value)
    assert f"{two}: has another shape" in str(error.value)
