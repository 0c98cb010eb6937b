import pytest
import torch
from training_runs import random_batch, small_model

from modicum.store import UserError
from modicum.train.loss import SupervisedLoss
from modicum.train.optimizer import AdamW, make_optimizer, moments, parameter_groups, restore_moments, set_rate


def names_by_decay(model):
    names = {id(weight): name for name, weight in model.named_parameters()}
    return {
        group["weight_decay"]: {names[id(weight)] for weight in group["params"]}
        for group in parameter_groups(model, 0.1)
    }


def test_only_matrices_decay_and_neither_norms_nor_biases_nor_embeddings(tokenizer):
    for model in (small_model(tokenizer, attention_bias=True, mlp_bias=True), small_model(tokenizer, qk_norm=True)):
        groups = names_by_decay(model)
        decaying = {
            f"model.layers.{layer}.{part}.weight"
            for layer in range(2)
            for part in (
                "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
                "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
            )
        }  # fmt: skip
        assert groups[0.1] == decaying
        assert groups[0.0] == {name for name, _ in model.named_parameters()} - decaying


def test_a_head_decays_only_where_it_is_not_the_embedding(tokenizer):
    assert "lm_head.weight" in names_by_decay(small_model(tokenizer, tie_word_embeddings=False))[0.1]
    assert "model.embed_tokens.weight" in names_by_decay(small_model(tokenizer))[0.0]


def test_decay_really_shrinks_matrices_and_leaves_the_rest(tokenizer):
    model = small_model(tokenizer)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    optimizer = make_optimizer(model, AdamW(weight_decay=0.5))
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    set_rate(optimizer, 0.1)
    optimizer.step()
    for name, weight in model.named_parameters():
        factor = 0.95 if name.endswith("_proj.weight") else 1.0
        assert torch.allclose(weight, before[name] * factor, rtol=1e-6, atol=0), name


def learnt(tokenizer, updates=2):
    model = small_model(tokenizer)
    optimizer = make_optimizer(model, AdamW())
    set_rate(optimizer, 1e-3)
    loss = SupervisedLoss(model, device=torch.device("cpu"), dtype=torch.float32, compiled=False)
    for seed in range(updates):
        loss(random_batch(tokenizer.vocab_size, 2, 8, seed=seed)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def test_moments_come_back_as_they_were(tokenizer):
    model, optimizer = learnt(tokenizer)
    saved = {name: tensor.clone() for name, tensor in moments(model, optimizer).items()}
    assert {name.rsplit(".", 1)[1] for name in saved} == {"exp_avg", "exp_avg_sq", "step"}
    other, fresh = learnt(tokenizer, updates=0)
    restore_moments(other, fresh, saved, "file")
    restored = moments(other, fresh)
    assert restored.keys() == saved.keys()
    assert all(torch.equal(restored[name], saved[name]) for name in saved)


def test_every_moment_that_is_missing_or_misshapen_is_named(tokenizer):
    model, optimizer = learnt(tokenizer)
    saved = dict(moments(model, optimizer))
    del saved["model.norm.weight.exp_avg"]
    saved["model.embed_tokens.weight.exp_avg_sq"] = torch.zeros(3)
    with pytest.raises(UserError) as error:
        restore_moments(model, optimizer, saved, "optimizer.safetensors")
    assert "optimizer.safetensors: model.norm.weight.exp_avg: missing" in str(error.value)
    assert "model.embed_tokens.weight.exp_avg_sq: has another shape" in str(error.value)
