import json

import pytest
from transformers import AutoConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from modicum.model import ModelConfig
from modicum.store import UserError

CLASSES = {False: LlamaConfig, True: Qwen3Config}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"qk_norm": True, "head_dim": 16},
        {"qk_norm": True, "attention_bias": True, "tie_word_embeddings": False},
        {"attention_bias": True, "mlp_bias": True, "attention_dropout": 0.1},
        {"rope_theta": 500_000.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_scaling": YARN},
        {"rope_scaling": LLAMA3, "rms_norm_eps": 1e-6, "initializer_range": 0.01},
    ],
)
def test_a_config_comes_back_from_transformers_as_it_went(tiny, changes, tmp_path):
    config = tiny(**changes)
    assert ModelConfig.from_hf(config.to_hf()) == config
    theirs = CLASSES[config.qk_norm](**config.to_hf(eos_token_id=[3, 0], pad_token_id=1))
    theirs.architectures = config.to_hf()["architectures"]
    theirs.save_pretrained(tmp_path)  # leaves the class's defaults out
    assert ModelConfig.from_hf(json.loads((tmp_path / "config.json").read_text())) == config


def test_the_file_speaks_to_old_and_new_readers(tiny, tmp_path):
    written = tiny(rope_scaling=YARN, rope_theta=50_000.0).to_hf(bos_token_id=None, eos_token_id=0, pad_token_id=1)
    assert written["rope_parameters"] == {**YARN, "rope_theta": 50_000.0}
    assert written["rope_scaling"] == YARN
    assert written["rope_theta"] == 50_000.0
    assert written["dtype"] == written["torch_dtype"] == "float32"
    assert (written["bos_token_id"], written["eos_token_id"], written["pad_token_id"]) == (None, 0, 1)
    (tmp_path / "config.json").write_text(json.dumps(written))
    read = AutoConfig.from_pretrained(tmp_path)
    assert (read.model_type, read.rope_parameters["rope_theta"]) == ("llama", 50_000.0)


def test_qk_norm_alone_decides_the_architecture(tiny):
    assert tiny().to_hf()["architectures"] == ["LlamaForCausalLM"]
    assert tiny(qk_norm=True).to_hf()["architectures"] == ["Qwen3ForCausalLM"]
    assert "mlp_bias" not in tiny(qk_norm=True).to_hf()


def test_a_file_from_before_rope_parameters_is_read():
    old = {
        "model_type": "llama",
        "vocab_size": 96,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "rope_theta": 1234.0,
        "rope_scaling": {"type": "linear", "factor": 2.0},
    }
    config = ModelConfig.from_hf(old)
    assert config.rope_theta == 1234.0
    assert config.rope_scaling == {"rope_type": "linear", "factor": 2.0}
    assert config.num_key_value_heads == 6  # what LlamaConfig takes for a missing value
    assert (config.rms_norm_eps, config.tie_word_embeddings) == (1e-6, False)


def test_missing_keys_mean_what_qwen3_means_by_them():
    bare = {"vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2}
    theirs = Qwen3Config(**bare, num_attention_heads=32)
    ours = ModelConfig.from_hf({**bare, "model_type": "qwen3", "num_attention_heads": 32})
    for name in ("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"):
        assert getattr(ours, name) == getattr(theirs, name), name


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"model_type": "mistral"}, "model_type 'mistral'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"sliding_window": 4096}, "sliding_window 4096"),
        (
            {"model_type": "qwen3", "architectures": None, "use_sliding_window": True, "sliding_window": 8},
            "sliding_window",
        ),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"model_type": "qwen3", "architectures": None, "mlp_bias": True}, "mlp_bias"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic NTK"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic NTK"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_what_the_decoder_does_not_do_is_refused_by_name(tiny, changes, word):
    with pytest.raises(UserError, match=word):
        ModelConfig.from_hf({**tiny().to_hf(), **changes})


def test_the_interleaved_layout_never_gets_into_a_file(tiny):
    with pytest.raises(ValueError, match="permute the rows"):
        tiny(rotary_layout="interleaved").to_hf()


def test_a_missing_size_is_named(tiny):
    config = tiny().to_hf()
    del config["hidden_size"], config["vocab_size"]
    with pytest.raises(UserError, match=r"vocab_size is missing\n  hidden_size is missing"):
        ModelConfig.from_hf(config)


def test_an_inactive_sliding_window_of_qwen3_is_no_obstacle(tiny):
    theirs = {**tiny(qk_norm=True).to_hf(), "use_sliding_window": False, "sliding_window": 4096}
    assert ModelConfig.from_hf(theirs) == tiny(qk_norm=True)


SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("kind", "theirs"),
    [
        ("qwen2", Qwen2Config(**SIZES, num_attention_heads=32)),
        ("mistral", MistralConfig(**SIZES, num_attention_heads=32, sliding_window=None)),
    ],
)
def test_missing_keys_of_an_import_mean_what_its_own_class_means_by_them(kind, theirs):
    given = {**SIZES, "model_type": kind, "num_attention_heads": 32, "sliding_window": None}
    ours = ModelConfig.from_hf(given, foreign=True)
    for name in ("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.head_dim == 64 // 32
    assert ours.attention_bias == (kind == "qwen2")


@pytest.mark.parametrize("kind", ["qwen2", "mistral"])
def test_a_checkpoint_of_ours_is_never_a_qwen2_or_a_mistral(tiny, kind):
    given = {**tiny().to_hf(), "model_type": kind, "architectures": None}
    assert ModelConfig.from_hf(given, foreign=True)
    with pytest.raises(UserError, match=rf"model_type '{kind}' is not supported; llama and qwen3 are"):
        ModelConfig.from_hf(given)


MISTRAL = {**SIZES, "model_type": "mistral", "num_attention_heads": 8, "max_position_embeddings": 512}


@pytest.mark.parametrize("window", [None, 512, 4096])
def test_a_mistral_whose_window_no_sequence_outgrows_attends_fully(window):
    assert ModelConfig.from_hf({**MISTRAL, "sliding_window": window}, foreign=True).max_position_embeddings == 512


@pytest.mark.parametrize(
    "changes", [{"sliding_window": 511}, {"max_position_embeddings": 8192}, {"layer_types": ["sliding_attention"]}]
)
def test_an_active_window_of_a_mistral_is_refused(changes):
    with pytest.raises(UserError, match=r"sliding_window (511|4096): every layer|layer_types \['sliding_attention'\]"):
        ModelConfig.from_hf({**MISTRAL, **changes}, foreign=True)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"model_type": ["llama"]}, r"model_type \['llama'\]"),
        ({"rope_parameters": "default"}, "rope_parameters must be dict or null, not 'default'"),
        ({"rope_scaling": [2.0]}, "rope_scaling must be dict or null"),
        ({"layer_types": 3}, "layer_types must be list or null"),
        ({"layer_types": [3]}, r"layer_types \['3'\]"),
        ({"sliding_window": "all"}, "sliding_window must be int or null"),
        ({"max_position_embeddings": "512"}, "max_position_embeddings must be int"),
        ({"rope_parameters": {"rope_theta": "10k"}}, "rope_theta must be a number above 0, not '10k'"),
        ({"mlp_bias": "false"}, "mlp_bias must be true or false, not 'false'"),
        ({"rope_parameters": None, "rope_theta": 10**400}, "rope_theta must be a number above 0"),
        ({"rope_parameters": None, "rope_theta": 0}, "rope_theta must be a number above 0"),
        ({"rope_parameters": {"rope_theta": ""}, "rope_theta": None}, "rope_theta must be a number above 0"),
        ({"partial_rotary_factor": 0}, "partial_rotary_factor 0: the whole head is rotated"),
        ({"attention_dropout": 10**400}, "attention_dropout must be"),
        ({"num_key_value_heads": "2"}, "num_key_value_heads must be int or null"),
    ],
)
def test_a_value_of_the_wrong_type_is_the_users_to_mend(tiny, changes, word):
    with pytest.raises(UserError, match=word):
        ModelConfig.from_hf({**tiny().to_hf(), **changes})
