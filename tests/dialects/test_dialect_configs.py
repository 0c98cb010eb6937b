"""Configs from files of strangers: whatever stands in one, it is a model that can be built or a fault that is named."""

import dataclasses
import json
from dataclasses import replace

import pytest
import torch
from dialect_models import DIALECTS, config
from hypothesis import example, given
from hypothesis import strategies as st

from modicum.dialects import core, cyberslm, slm
from modicum.model.frequencies import rotary_frequencies
from modicum.store import UserError

MODULES = {"cyberslm": cyberslm, "slm": slm, "core": core}
KEYS = [(dialect, field.name) for dialect in DIALECTS for field in dataclasses.fields(config(dialect))]
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
FOREIGN = st.sampled_from([torch.tensor(8), torch.tensor(8, device="meta"), torch.ones(2), torch.float16, b"8", 8j])
VALUES = st.recursive(
    PLAIN | FOREIGN,
    lambda part: st.lists(part, max_size=2) | st.dictionaries(st.text(max_size=3), part, max_size=2),
    max_leaves=4,
)


def settings_of(dialect, changes):
    values = {**dataclasses.asdict(config(dialect)), **changes}
    read = MODULES[dialect]
    return read.model_config(read.config_from_dict(values))


def can_be_built(settings) -> bool:
    """Its config.json is JSON of finite numbers, its angles are finite, and its positions are counted in 32 bits."""
    written = json.dumps(replace(settings, rotary_layout="half").to_hf(), allow_nan=False)
    angles = rotary_frequencies(min(settings.head_dim, 512), settings.rope_theta, None, 1)[0]
    epsilon = torch.tensor(0.0).add(settings.rms_norm_eps)
    return (
        len(written) < 5000
        and bool(angles.isfinite().all() and angles.gt(0).all() and epsilon.isfinite() and epsilon > 0)
        and settings.max_position_embeddings < 2**31
        and settings.num_hidden_layers <= 2**16
    )


@given(st.sampled_from(KEYS), VALUES)
@example(("core", "multiple_of"), 0)
@example(("core", "ffn_dim_multiplier"), float("inf"))
@example(("core", "ffn_dim_multiplier"), 10**400)
@example(("core", "n_embd"), 10**400)
@example(("cyberslm", "norm_eps"), 10**400)
@example(("slm", "rms_norm_eps"), 2**70)
@example(("slm", "num_attention_heads"), [4])
def test_any_value_of_any_key_is_a_model_or_a_fault_that_is_named(key, value):
    dialect, name = key
    try:
        settings = settings_of(dialect, {name: value})
    except UserError:
        return
    assert can_be_built(settings)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("value", [[4], {"a": 1}, torch.tensor(8, device="meta"), torch.float32, b"4"])
def test_all_values_that_are_not_plain_are_named_at_once(dialect, value):
    names = [field.name for field in dataclasses.fields(config(dialect))][:3]
    with pytest.raises(UserError) as caught:
        settings_of(dialect, dict.fromkeys(names, value))
    for name in names:
        assert f"  {name}: expected a plain value, not a {type(value).__name__}" in str(caught.value)


@pytest.mark.parametrize(
    ("dialect", "changes", "words"),
    [
        ("slm", {"hidden_size": "48", "head_dim": None}, "hidden_size must be a whole number of at least 1, not '48'"),
        ("slm", {"num_attention_heads": 6.0, "head_dim": None}, "num_attention_heads must be a whole number"),
        ("slm", {"head_dim": ""}, "head_dim must be a whole number of at least 0, not ''"),
        ("slm", {"rope_theta": 10**400}, "rope_theta must be a number above 0, not 1000"),
        ("slm", {"num_hidden_layers": 2**40}, "num_hidden_layers must be at most 65536, not 1099511627776"),
        ("core", {"multiple_of": 0}, "multiple_of must be a whole number of at least 1, not 0"),
        ("core", {"ffn_dim_multiplier": float("inf")}, "ffn_dim_multiplier must be a number above 0, not inf"),
        ("core", {"n_head": "6"}, "n_embd 24 is not divisible by n_head '6'"),
        ("core", {"norm_eps": 1e-42}, "rms_norm_eps must be from 1.18e-38 to 3.4e+38, as float32 holds it, not 1e-42"),
        ("cyberslm", {"norm_eps": 10**5000}, "norm_eps must be a number above 0, not a number of thousands of digits"),
        ("cyberslm", {"max_seq_len": 2**62}, "max_seq_len must be at most 2147483647, not 4611686018427387904"),
        ("cyberslm", {"rope_base": 1e308}, r"rope_base must be from 1.18e-38 to 3.4e\+38, .* not 1e\+308"),
    ],
)
def test_what_is_amiss_with_a_value_is_said_in_the_files_own_words(dialect, changes, words):
    with pytest.raises(UserError, match=words if r"\+" in words else words.replace("+", r"\+")):
        settings_of(dialect, changes)


def test_blocks_made_of_a_config_without_a_width_say_so_too():
    with pytest.raises(UserError, match="multiple_of must be a whole number of at least 1, not 0"):
        core.SwiGLUMLP(core.ModelConfig(multiple_of=0))


def test_validate_names_what_is_wrong_and_nothing_that_only_follows_from_it():
    def faults(**values):
        with pytest.raises(ValueError, match="not valid") as caught:
            cyberslm.CyberSLMConfig(**values).validate()
        return [line.strip() for line in str(caught.value).splitlines()[1:]]

    assert faults(vocab_size=0, hidden_dim=100, num_heads=3, head_dim=64) == [
        "vocab_size must be a whole number of at least 1, not 0",
        "hidden_dim 100 is not num_heads 3 * head_dim 64",
    ]
    assert faults(num_heads=0) == ["num_heads must be a whole number of at least 1, not 0"]
    assert faults(hidden_dim=3, num_heads=6) == ["hidden_dim 3 is not num_heads 6 * head_dim 0"]
    assert faults(num_layers=0, eos_token_id=-1, bos_token_id=32_000, pad_token_id="0") == [
        "num_layers must be a whole number of at least 1, not 0",
        "pad_token_id must be None or an id below vocab_size, not '0'",
        "bos_token_id must be None or an id below vocab_size, not 32000",
        "eos_token_id must be None or an id below vocab_size, not -1",
    ]
    assert faults(head_dim=torch.tensor(64, device="meta"), pad_token_id=torch.tensor(1))
