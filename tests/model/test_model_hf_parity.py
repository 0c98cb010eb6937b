import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from modicum.model import Decoder, KVCache
from modicum.store import UserError

SHAPES = {
    "llama": {},
    "llama, one key head": {"num_key_value_heads": 1},
    "llama, all key heads": {"num_key_value_heads": 6},
    "llama, biases": {"attention_bias": True, "mlp_bias": True},
    "llama, attention biases": {"attention_bias": True},
    "llama, untied": {"tie_word_embeddings": False},
    "llama, wide heads": {"head_dim": 16},
    "llama, linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "llama, llama3": {
        "rope_theta": 5e5,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "llama, yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
    "qwen3": {"qk_norm": True},
    "qwen3, biases, wide heads, untied": {
        "qk_norm": True,
        "attention_bias": True,
        "head_dim": 16,
        "tie_word_embeddings": False,
    },
    "qwen3, odd width": {"qk_norm": True, "hidden_size": 50, "head_dim": 12},
    "qwen3, yarn": {"qk_norm": True, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
}
CLASSES = {False: (LlamaConfig, LlamaForCausalLM), True: (Qwen3Config, Qwen3ForCausalLM)}


def theirs_from(config):
    config_class, model_class = CLASSES[config.qk_norm]
    return model_class(config_class(**config.to_hf())).eval()


@pytest.mark.parametrize("name", SHAPES)
def test_transformers_loads_our_weights_and_agrees(tiny, lively, some_ids, name):
    config = tiny(**SHAPES[name])
    ours, theirs, ids = lively(config), theirs_from(config), some_ids(2, 150)
    missing, unexpected = theirs.load_state_dict(ours.state_dict(), strict=False)
    assert unexpected == []
    assert missing == (["lm_head.weight"] if config.tie_word_embeddings else [])
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", SHAPES)
def test_we_load_the_weights_of_transformers_and_agree(tiny, some_ids, name):
    config = tiny(**SHAPES[name], initializer_range=0.2)
    torch.manual_seed(0)
    theirs, ours, ids = theirs_from(config), Decoder(config).eval(), some_ids(2, 150)
    ours.load_state_dict(theirs.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_directory_written_from_our_state_is_read_by_auto_classes(tiny, lively, some_ids, tmp_path, name):
    import json

    from safetensors.torch import save_file

    config = tiny(**SHAPES[name])
    ours, ids = lively(config), some_ids(1, 40)
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf(eos_token_id=0)))
    save_file(ours.state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_padded_batches_agree_on_the_kept_places(tiny, lively, some_ids, name):
    config = tiny(**SHAPES[name])
    ours, theirs, ids = lively(config), theirs_from(config), some_ids(2, 30)
    theirs.load_state_dict(ours.state_dict(), strict=False)
    keep = torch.ones(2, 30, dtype=torch.int64)
    keep[1, :11] = 0
    places = (keep.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        expected = theirs(ids, attention_mask=keep, position_ids=places).logits
        torch.testing.assert_close(
            ours(ids, attention_mask=keep)[keep.bool()], expected[keep.bool()], rtol=0, atol=1e-4
        )


def test_bf16_agrees_with_transformers_in_bf16_as_well_as_with_fp32(tiny, lively, some_ids):
    config = tiny(qk_norm=True)
    ours, theirs, ids = lively(config), theirs_from(config), some_ids(2, 60)
    theirs.load_state_dict(ours.state_dict(), strict=False)
    with torch.no_grad():
        exact = ours(ids)
        low, their_low = ours.bfloat16()(ids).float(), theirs.bfloat16()(ids).logits.float()
    assert (low - exact).abs().mean() < 1.2 * (their_low - exact).abs().mean()


def test_greedy_continuation_equals_that_of_transformers(tiny, lively, some_ids):
    config = tiny(rope_scaling=SHAPES["llama, yarn"]["rope_scaling"])
    ours, theirs, ids = lively(config), theirs_from(config), some_ids(1, 20)
    theirs.load_state_dict(ours.state_dict(), strict=False)
    expected = theirs.generate(ids, max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0)
    cache, out = KVCache(config, 1, 64), ids
    with torch.no_grad():
        for _ in range(30):
            out = torch.cat([out, ours(out[:, cache.length :], cache=cache)[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(out, expected)


def test_a_doubled_head_that_differs_from_a_tied_embedding_is_refused(tiny, lively):
    model = lively(tiny())
    state = model.state_dict()
    assert "lm_head.weight" not in state
    model.load_state_dict({**state, "lm_head.weight": state["model.embed_tokens.weight"].clone()})
    with pytest.raises(UserError, match="tie_word_embeddings"):
        model.load_state_dict({**state, "lm_head.weight": state["model.embed_tokens.weight"] + 1})
