import tracemalloc

import numpy as np
import pytest
import torch

from modicum.model import Decoder, reference
from modicum.model.reference import reference_logits

SCALINGS = {
    "none": None,
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn, mscale": {"rope_type": "yarn", "factor": 8.0, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False},
}


def agree(model, ids, **given):
    with torch.no_grad():
        ours = model(ids, **given)
    theirs = reference_logits(model.state_dict(), model.config, ids, **given)
    assert abs(ours.double().numpy() - theirs).max() < 1e-4
    assert abs(theirs).max() > 1  # so that 1e-4 means something


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_every_scaling_in_both_layouts_agrees_with_float64(tiny, lively, some_ids, layout, scaling):
    agree(lively(tiny(rotary_layout=layout, rope_scaling=SCALINGS[scaling])), some_ids(2, 24))


@pytest.mark.parametrize(
    "changes",
    [
        {"qk_norm": True},
        {"qk_norm": True, "attention_bias": True, "rotary_layout": "interleaved", "head_dim": 16},
        {"attention_bias": True, "mlp_bias": True},
        {"tie_word_embeddings": False, "num_key_value_heads": 1},
        {"num_key_value_heads": 6, "rms_norm_eps": 0.1, "rope_theta": 100.0},
    ],
)
def test_every_switch_agrees_with_float64(tiny, lively, some_ids, changes):
    agree(lively(tiny(**changes)), some_ids(2, 24))


@pytest.mark.parametrize("impl", ["sdpa", "blocks"])
def test_masks_and_default_positions_agree_with_float64(tiny, lively, some_ids, impl):
    model = lively(tiny(qk_norm=True))
    model.attention_impl, model.attention_block = impl, 8
    keep = torch.ones(3, 24, dtype=torch.bool)
    keep[0, :7] = False
    keep[1, -4:] = False
    documents = torch.zeros(3, 24, dtype=torch.int32)
    documents[:, 10:] = 1
    documents[2, 20:] = -1
    agree(model, some_ids(3, 24), attention_mask=keep, documents=documents)


def test_given_positions_agree_with_float64(tiny, lively, some_ids):
    agree(lively(tiny()), some_ids(2, 12), positions=torch.randint(0, 400, (2, 12)))


def test_half_and_interleaved_are_the_same_model_once_rows_are_permuted(tiny, lively, some_ids):
    config = tiny(attention_bias=True)
    model, ids = lively(config), some_ids(1, 16)
    state = model.state_dict()
    pairs = torch.arange(config.head_dim).view(2, -1).T.flatten()
    for name, value in state.items():
        if "q_proj" in name or "k_proj" in name:
            heads = value.view(-1, config.head_dim, *value.shape[1:])
            state[name] = heads[:, pairs].reshape(value.shape)
    other = lively(tiny(attention_bias=True, rotary_layout="interleaved"))
    other.load_state_dict(state)
    with torch.no_grad():
        torch.testing.assert_close(other(ids), model(ids), rtol=0, atol=1e-5)


def test_bfloat16_weights_mean_the_numbers_that_they_hold(tiny, lively, some_ids):
    model, ids = lively(tiny(tie_word_embeddings=False)).bfloat16(), some_ids(1, 5)
    widened = {name: value.double().numpy() for name, value in model.state_dict().items()}
    logits = reference_logits(model.state_dict(), model.config, ids)
    np.testing.assert_array_equal(logits, reference_logits(widened, model.config, ids))


def test_a_head_in_parts_is_the_whole_head(tiny, lively, some_ids, monkeypatch):
    model, ids = lively(tiny()), some_ids(1, 5)
    whole = reference_logits(model.state_dict(), model.config, ids)
    monkeypatch.setattr(reference, "_HEAD_ROWS", 7)
    np.testing.assert_allclose(reference_logits(model.state_dict(), model.config, ids), whole, rtol=0, atol=1e-12)


def test_the_weights_are_never_all_in_memory_as_float64(tiny, some_ids):
    config = tiny(num_hidden_layers=12, vocab_size=1024)
    model = Decoder(config)
    tracemalloc.start()
    reference_logits(model.state_dict(), config, some_ids(1, 3))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 0.5 * 8 * config.parameter_count()
