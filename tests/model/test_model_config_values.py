"""What may stand in a config: any value of any key is a decoder that can be built, or a fault that is named."""

import json

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from modicum.model import Decoder, ModelConfig
from modicum.model.config import feed_forward_width
from modicum.model.frequencies import rotary_frequencies
from modicum.model.rotary import RotaryEmbedding
from modicum.store import UserError

SIZES = {
    "vocab_size": 96,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "max_position_embeddings": 512,
}
FILES = [
    ModelConfig(**SIZES).to_hf(),
    ModelConfig(**SIZES, qk_norm=True, head_dim=16).to_hf(),
    {**ModelConfig(**SIZES).to_hf(), "model_type": "qwen2", "architectures": None},
    {**ModelConfig(**SIZES).to_hf(), "model_type": "mistral", "architectures": None},
]
MORE_KEYS = ["partial_rotary_factor", "layer_types", "quantization_config", "use_sliding_window", "sliding_window"]
KEYS = sorted({*FILES[0], *FILES[1], *MORE_KEYS})
PLAIN = (
    st.none()
    | st.booleans()
    | st.integers(-3, 100)
    | st.sampled_from([10**400, -(10**400), 2**62, 2**31, 2**31 - 1, 2**16 + 1])
    | st.just(5000).map(lambda digits: 10**digits)  # which cannot be written, by hypothesis no more than by us
    | st.floats()
    | st.sampled_from([1e308, 1e39, 1e-39, 5e-324, float("inf"), float("nan"), 48.0])
    | st.text(max_size=4)
    | st.sampled_from(["24", "1e-5", "x" * 1000])
)
JSON = st.recursive(
    PLAIN,
    lambda part: st.lists(part, max_size=2) | st.dictionaries(st.text(max_size=3), part, max_size=2),
    max_leaves=4,
)
SCALING_KEYS = [
    *("rope_type", "type", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    *("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    *("partial_rotary_factor", "rope_theta"),
]
SCALINGS = [
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    {"rope_type": "yarn", "factor": 4.0},
]


def can_be_built(config: ModelConfig) -> bool:
    """Its config.json is JSON of finite numbers, its angles are finite, and every number is one in float32."""
    json.dumps(config.to_hf(), allow_nan=False)
    width = min(config.head_dim, 512)
    angles, factor = rotary_frequencies(width, config.rope_theta, config.rope_scaling, config.max_position_embeddings)
    numbers = torch.tensor([config.rms_norm_eps, config.initializer_range, factor])
    return bool(angles.isfinite().all() and angles.gt(0).all() and numbers.isfinite().all() and numbers.gt(0).all())


def built_or_refused(given_config: dict) -> None:
    try:
        config = ModelConfig.from_hf(given_config, foreign=True)
    except UserError:
        return
    assert can_be_built(config)


@given(st.sampled_from(FILES), st.dictionaries(st.sampled_from(KEYS), JSON, min_size=1, max_size=2))
@example(FILES[0], {"initializer_range": 10**400})
@example(FILES[0], {"rms_norm_eps": 10**400})
@example(FILES[0], {"mlp_bias": "false"})
def test_any_value_of_any_key_of_a_file_is_a_decoder_or_a_fault_that_is_named(file, changes):
    built_or_refused({**file, **changes})


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("value", [10**5000, [10**5000], {"rope_type": 10**5000}], ids=["int", "list", "dict"])
def test_a_number_of_thousands_of_digits_is_a_fault_like_others(key, value):
    built_or_refused({**FILES[0], key: value})


@given(st.sampled_from(SCALINGS), st.dictionaries(st.sampled_from(SCALING_KEYS), JSON, min_size=1, max_size=2))
@example(SCALINGS[2], {"rope_theta": 1.0})
@example(SCALINGS[3], {"beta_fast": 1e-320})
@example(SCALINGS[0], {"rope_type": ["linear"]})
@example(SCALINGS[0], {"factor": 10**400})
def test_any_value_in_a_rotary_scaling_is_a_decoder_or_a_fault_that_is_named(scaling, changes):
    changed = {**scaling, **changes}
    for spelling in ({"rope_parameters": changed, "rope_scaling": None}, {"rope_scaling": changed}):
        built_or_refused({**FILES[0], **spelling})
        built_or_refused({**FILES[1], **spelling})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_position_embeddings": 2**62}, "max_position_embeddings must be at most 2147483647, not 46116860184"),
        ({"num_hidden_layers": 2**31 - 1}, "num_hidden_layers must be at most 65536"),
        ({"rope_theta": 1e308}, r"rope_theta must be from 1.18e-38 to 3.4e\+38, as float32 holds it, not 1e\+308"),
        ({"rms_norm_eps": 10**400}, r"rms_norm_eps must be a number above 0, not 1000.*\.\.\.$"),
        ({"initializer_range": 10**5000}, "initializer_range must be a number above 0, not a number of thousands"),
        ({"rope_scaling": ["linear"]}, "rope_scaling must be a dictionary or None"),
        ({"rope_theta": 1.0, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "needs a rope_theta above 1"),
        ({"rope_scaling": {"rope_type": "linear", "factor": float("inf")}}, "factor must be a number above 0, from"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": 0}}, "truncate must be true or false"),
    ],
)
def test_a_value_beyond_what_can_be_computed_is_refused_by_name(changes, words):
    with pytest.raises(UserError, match=words):
        ModelConfig(**{**SIZES, **changes})


def test_the_limits_themselves_are_taken():
    config = ModelConfig(**{**SIZES, "max_position_embeddings": 2**31 - 1, "rope_theta": 3e38})
    assert RotaryEmbedding(config).frequencies.isfinite().all()
    assert Decoder(config)(torch.zeros(1, 3, dtype=torch.int64)).isfinite().all()


def test_a_whole_number_where_a_float_is_meant_is_a_float_from_there_on():
    config = ModelConfig(**SIZES, rope_theta=10_000, rms_norm_eps=2**70, attention_dropout=0)
    for value in (config.rope_theta, config.rms_norm_eps, config.attention_dropout):
        assert type(value) is float
    assert Decoder(config)(torch.zeros(1, 3, dtype=torch.int64)).isfinite().all()  # PyTorch adds no int of 70 bits


@pytest.mark.parametrize(
    ("given_values", "words"),
    [
        ((64, None, 0), "multiple_of must be a whole number of at least 1, not 0"),
        ((64, float("inf"), 8), "ffn_dim_multiplier must be a number above 0, not inf"),
        ((64, 0, 8), "ffn_dim_multiplier must be a number above 0, not 0"),
        ((10**400, None, 8), "the hidden size must be at most 2147483647"),
    ],
)
def test_a_feed_forward_without_a_width_is_refused_by_name(given_values, words):
    with pytest.raises(UserError, match=words):
        feed_forward_width(*given_values)
