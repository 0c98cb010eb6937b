"""Parameters by part against the model itself, FLOPs against a count of the multiplications that really run."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from modicum.model import Decoder, ModelConfig, parameters_by_part, training_flops_per_token
from modicum.road.sizes import logits_bytes, training_state
from modicum.train.optimizer import Optimizer, OptimizerSettings

SHAPES = [
    {},
    {"num_key_value_heads": 2, "qk_norm": True},
    {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
]


def config_of(**changes):
    sizes = {"vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    return ModelConfig(**{**sizes, "intermediate_size": 192, **changes})


@pytest.mark.parametrize("changes", SHAPES)
def test_the_parts_are_what_the_model_holds(changes):
    config = config_of(**changes)
    named = dict(Decoder(config).named_parameters())

    def held(*words):
        return sum(p.numel() for name, p in named.items() if any(word in name for word in words))

    parts = parameters_by_part(config)
    assert parts.embedding == held("embed_tokens")
    assert parts.head == held("lm_head")
    assert parts.attention == held("_proj") - held("mlp.")
    assert parts.mlp == held("mlp.")
    assert parts.norms == held("norm")
    assert parts.total == config.parameter_count() == sum(p.numel() for p in named.values())


def test_the_seed_system_has_its_exact_size():
    config = config_of(
        vocab_size=32_000, hidden_size=384, num_hidden_layers=12, num_attention_heads=6, intermediate_size=1024
    )
    assert parameters_by_part(config).total == 33_531_264


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False}])
def test_flops_are_what_a_training_step_multiplies(changes):
    config = config_of(**changes)
    model = Decoder(config)
    model.attention_impl = "blocks"
    model.attention_block = 16
    length = 512
    ids = torch.zeros(1, length, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(ids).sum().backward()
    # blocks of 16 still multiply half a block of what is masked; that is 3 % of the scores here
    assert counter.get_total_flops() == pytest.approx(training_flops_per_token(config, length) * length, rel=0.03)


def test_training_holds_sixteen_bytes_for_each_parameter():
    config = config_of()
    state = training_state(config)
    assert state.weights + state.gradients + state.optimizer == 16 * config.parameter_count()
    assert logits_bytes(config, 100, bytes_each=4) == 2 * 100 * 320 * 4


def test_the_moments_are_as_many_bytes_as_the_optimizers_really_keep():
    for changes in SHAPES:
        model = Decoder(config_of(**changes))
        for weight in model.parameters():
            weight.grad = torch.zeros_like(weight)
        for kind in ("adamw", "muon"):
            for dtype in (torch.float32, torch.bfloat16):
                optimizer = Optimizer(model, OptimizerSettings(kind), dtype)
                optimizer.step()
                kept = {name: moment for name, moment in optimizer.moments(model).items() if not name.endswith(".step")}
                assert training_state(model.config, kind).optimizer == sum(moment.nbytes for moment in kept.values())
