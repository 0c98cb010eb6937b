import pytest
import torch

from modicum.model import Decoder, ModelConfig
from modicum.model.config import feed_forward_width
from modicum.recipe import PRESETS, ModelSettings
from modicum.store import UserError


def preset(name: str) -> ModelConfig:
    settings = ModelSettings(preset=name)
    return ModelConfig.from_settings(settings, settings.vocab_size)


def test_cyberslm_has_its_exact_size():
    assert preset("cyberslm").parameter_count() == 33_531_264


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_the_counted_parameters_of_a_preset_are_those_it_has(name):
    config = preset(name)
    with torch.device("meta"):
        model = Decoder(config)
    assert sum(weight.numel() for weight in model.parameters()) == config.parameter_count()


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": False},
        {"attention_bias": True, "mlp_bias": True},
        {"qk_norm": True, "attention_bias": True, "head_dim": 16},
        {"num_key_value_heads": 1},
    ],
)
def test_the_count_knows_every_switch(tiny, changes):
    config = tiny(**changes)
    assert sum(weight.numel() for weight in Decoder(config).parameters()) == config.parameter_count()


def test_the_feed_forward_rule_gives_the_published_width_of_llama_7b():
    assert feed_forward_width(4096, None, 256) == 11008
    assert feed_forward_width(4096, 1.3, 1024) == 14336  # Llama 3 8B


def test_a_recipe_without_a_width_gets_the_rule():
    settings = ModelSettings(hidden_size=256, ffn_dim_multiplier=1.5, multiple_of=64)
    assert ModelConfig.from_settings(settings, 512).intermediate_size == 1024
    assert ModelConfig.from_settings(settings, 512).vocab_size == 512


def test_all_faults_of_a_config_are_told_at_once():
    with pytest.raises(UserError) as told:
        ModelConfig(
            vocab_size=96,
            hidden_size=48,
            num_hidden_layers=1,
            num_attention_heads=6,
            num_key_value_heads=4,
            intermediate_size=8,
            head_dim=7,
            qk_norm=True,
            mlp_bias=True,
        )
    for word in ("num_key_value_heads 4", "head_dim must be even", "qk_norm with mlp_bias"):
        assert word in str(told.value)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"vocab_size": 0}, "vocab_size must be a whole number of at least 1, not 0"),
        ({"hidden_size": "48"}, "hidden_size must be a whole number of at least 1, not '48'"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers must be a whole number"),
        ({"qk_norm": 1}, "qk_norm must be true or false"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps must be a number above 0, not '1e-6'"),
        ({"rope_theta": float("nan")}, "rope_theta must be a number above 0"),
        ({"attention_dropout": 1.0}, "attention_dropout must be at least 0 and below 1"),
        ({"hidden_size": 50}, "does not divide hidden_size"),
        ({"hidden_size": 50, "head_dim": 8}, "stock Llama"),
        ({"rope_theta": 0.0}, "rope_theta"),
        ({"rotary_layout": "spiral"}, "rotary_layout"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "linear needs factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta": 1}}, "beta is unknown to linear"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "must be a number"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "at least 1"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
            "times original_max_position_embeddings 64 must be",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 4}},
            "low_freq_factor must be below",
        ),
    ],
)
def test_what_cannot_be_built_is_refused_by_name(tiny, changes, word):
    with pytest.raises(UserError, match=word):
        tiny(**changes)


def test_a_qwen3_may_have_heads_that_do_not_divide_its_width(tiny):
    config = tiny(hidden_size=50, head_dim=8, qk_norm=True)
    assert Decoder(config)(torch.zeros(1, 3, dtype=torch.int64)).shape == (1, 3, 96)


def test_one_meaning_of_a_scaling_has_one_spelling(tiny):
    assert tiny(rope_scaling={"type": "linear", "factor": 2.0}).rope_scaling == {"rope_type": "linear", "factor": 2.0}
    assert tiny(rope_scaling={"rope_type": "default"}).rope_scaling is None
    same_length = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert tiny(rope_scaling=same_length).rope_scaling == {"rope_type": "yarn", "factor": 4.0}
