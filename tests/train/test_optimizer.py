import math

import numpy as np
import pytest
import torch
from training_runs import random_batch, small_model

from modicum.store import UserError
from modicum.train.loss import SupervisedLoss
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
        wanted = {"momentum_buffer"} if name in MATRICES else {"exp_avg", "exp_avg_sq", "step"}
        assert {moment.rsplit(".", 1)[1] for moment in kept if moment.rsplit(".", 1)[0] == name} == wanted


def newton_schulz(matrix):
    """Five steps of the quintic iteration with Jordan et al.'s coefficients, in float64."""
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / np.linalg.norm(x)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


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
        expected = -0.01 * 0.2 * math.sqrt(max(weight.shape)) * newton_schulz(gradient)
        moved = named[name].detach().double().numpy() - weight
        assert np.linalg.norm(moved - expected) < tolerance * np.linalg.norm(expected), name


def test_muon_in_fp32_goes_on_as_torchs_does(tokenizer):
    (ours, _), (torchs, _) = (
        learnt(tokenizer, updates=6, kind="muon", dtype=d) for d in (torch.float32, torch.bfloat16)
    )
    start = small_model(tokenizer)
    for (name, one), two, begun in zip(ours.named_parameters(), torchs.parameters(), start.parameters(), strict=True):
        if name in MATRICES:
            assert (one - two).norm() < 0.1 * (two - begun).norm(), name


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
