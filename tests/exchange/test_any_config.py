"""Any value under any key of a foreign config: a model that can be written and read again, or one clear refusal."""

import json
from dataclasses import replace

import foreign_models
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from modicum.exchange.described import describe
from modicum.model import ModelConfig
from modicum.store import UserError

HUGGING_FACE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 384, "hidden_size": 48,
    "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "initializer_range": 0.02, "attention_dropout": 0.0,
    "attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None, "torch_dtype": "float32", "pretraining_tp": 1,
    "sliding_window": None, "use_sliding_window": False, "layer_types": None, "partial_rotary_factor": 1.0,
    "quantization_config": None, "rope_theta": 10000.0, "rope_scaling": None, "rope_parameters": None,
}  # fmt: skip
CONFIGS = {
    **{dialect: foreign_models.config(dialect, 384) for dialect in foreign_models.DIALECTS},
    "hf": HUGGING_FACE,
}
ROTARY = ("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "low_freq_factor",
          "high_freq_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor")  # fmt: skip
KINDS = ("default", "linear", "yarn", "llama3", "dynamic")
SIZES = [0, 1, -1, 8, 2**31 - 1, 2**31, 2**62, 2**64, 10**400, -(10**400)]
NUMBERS = [0.0, -0.0, 0.5, 1e-320, 1e-45, 1e308, float("inf"), -float("inf"), float("nan")]
PLAIN = st.none() | st.booleans() | st.sampled_from(SIZES + NUMBERS) | st.sampled_from(["", "48", "silu", *KINDS])
PLAIN |= st.integers() | st.floats() | st.text(max_size=4)
ROPES = st.dictionaries(st.sampled_from(ROTARY), PLAIN | st.just([1]) | st.sampled_from(KINDS), max_size=5)
ANY = st.recursive(PLAIN | ROPES, lambda one: st.lists(one, max_size=3) | st.dictionaries(st.text(max_size=3), one))
TENSORS = [torch.tensor(8), torch.ones(2), torch.tensor(8, device="meta")]  # a torch file may hold them


def holds(values, dialect):
    """Assert what the module's first line says: what is read can be written for transformers and read again."""
    try:
        described = describe(values, dialect, "a config")
    except UserError:
        return
    config = replace(described.config, rotary_layout="half")
    again = ModelConfig.from_hf(json.loads(json.dumps(config.to_hf(), allow_nan=False)))
    assert again.parameter_count() == config.parameter_count()
    assert again.to_hf() == config.to_hf()


@pytest.mark.parametrize("dialect", CONFIGS)
def test_the_config_itself_is_a_models(dialect):
    assert describe(CONFIGS[dialect], dialect, "a config").config.vocab_size == 384


@pytest.mark.parametrize("dialect", CONFIGS)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_value_under_any_key_is_a_model_or_one_clear_refusal(dialect, data):
    keys = st.sampled_from([*CONFIGS[dialect], "unknown"])
    value = ANY if dialect == "hf" else ANY | st.sampled_from(TENSORS)
    holds({**CONFIGS[dialect], **data.draw(st.dictionaries(keys, value, min_size=1, max_size=2))}, dialect)


@given(key=st.sampled_from(["rope_parameters", "rope_scaling"]), kind=st.sampled_from(KINDS), rotary=ROPES)
@example(key="rope_parameters", kind="yarn", rotary={"factor": 1e308, "original_max_position_embeddings": 1})
@example(key="rope_scaling", kind="llama3", rotary={"factor": 8})
@settings(max_examples=150, deadline=None)
def test_any_rotary_scaling_is_a_model_or_one_clear_refusal(key, kind, rotary):
    holds({**HUGGING_FACE, key: {"rope_type": kind, "rope_theta": 10000.0, **rotary}}, "hf")


@pytest.mark.parametrize(
    ("dialect", "changes"),
    [
        ("cyberslm", {"head_dim": torch.tensor(12, device="meta")}),
        ("cyberslm", {"pad_token_id": torch.tensor(0, device="meta")}),
        ("slm", {"hidden_size": "48"}),
        ("slm", {"num_attention_heads": [4]}),
        ("core", {"multiple_of": 0}),
        ("core", {"ffn_dim_multiplier": float("inf")}),
        ("cyberslm", {"norm_eps": 10**400}),
        ("slm", {"rms_norm_eps": 10**400}),
        ("hf", {"rms_norm_eps": 10**400}),
        ("hf", {"initializer_range": 10**400}),
        ("hf", {"rope_theta": 10**400}),
    ],
)
def test_what_no_model_can_be_made_of_is_refused_before_anything_is_computed(dialect, changes):
    with pytest.raises(UserError, match=next(iter(changes))):
        describe({**CONFIGS[dialect], **changes}, dialect, "a config")
