import math
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from modicum.model import Decoder
from modicum.model.rotary import RotaryEmbedding, rotate

SCALINGS = {
    "none": None,
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn, trained length unsaid": {"rope_type": "yarn", "factor": 4.0},
    "yarn, factor given": {
        "rope_type": "yarn",
        "factor": 4.0,
        "attention_factor": 0.7,
        "beta_fast": 16,
        "beta_slow": 2,
    },
    "yarn, mscale": {"rope_type": "yarn", "factor": 8.0, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False},
}


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
def test_angles_equal_those_of_transformers(tiny, name, theta):
    config = tiny(head_dim=64, rope_theta=theta, rope_scaling=SCALINGS[name])
    theirs = LlamaRotaryEmbedding(LlamaConfig(**config.to_hf()))
    positions = torch.tensor([[0, 1, 2, 511, 100_000]])
    cos, sin = theirs(torch.zeros(1), positions)
    ours = RotaryEmbedding(config)(positions)
    sign = torch.ones(64)
    sign[:32] = -1  # ours carries the sign that theirs puts into the turned half
    torch.testing.assert_close(ours[0][:, 0], cos, rtol=0, atol=1e-6)
    torch.testing.assert_close(ours[1][:, 0] * sign, sin, rtol=0, atol=1e-6)


def test_yarn_sharpens_by_its_published_factor(tiny):
    # Peng et al. 2023, equation 22: sqrt(1/t) = 0.1 ln(s) + 1
    assert RotaryEmbedding(tiny(rope_scaling=SCALINGS["yarn"])).factor == pytest.approx(1.1386294)


def test_half_and_interleaved_turn_the_same_pairs(tiny):
    x = torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(0))
    pairs = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])  # channel i and i + 4 of the half layout side by side
    places = torch.tensor([[0, 3, 5, 9, 200]])
    half = rotate(x, *RotaryEmbedding(tiny())(places), "half")
    table = RotaryEmbedding(tiny(rotary_layout="interleaved"))(places)
    interleaved = rotate(x[..., pairs], *table, "interleaved")
    torch.testing.assert_close(interleaved, half[..., pairs])
    assert not torch.allclose(interleaved, half)


def test_the_rotation_of_a_pair_is_the_complex_product(tiny):
    config = tiny(head_dim=2, rope_theta=10.0)  # one pair, which turns by one radian a position
    turned = complex(3, 4) * complex(math.cos(5), math.sin(5))
    for layout in ("half", "interleaved"):
        cos, sin = RotaryEmbedding(replace(config, rotary_layout=layout))(torch.tensor([[5]]))
        out = rotate(torch.tensor([[[[3.0, 4.0]]]]), cos, sin, layout).flatten()
        torch.testing.assert_close(out, torch.tensor([turned.real, turned.imag]))


def test_casting_the_model_leaves_the_frequencies_alone(tiny):
    before = RotaryEmbedding(tiny()).frequencies
    model = Decoder(tiny()).bfloat16()
    assert torch.equal(model.model.rotary.frequencies, before)
    assert model.model.rotary(torch.tensor([[7]]))[0].dtype == torch.float32


def test_a_model_that_was_never_filled_still_knows_its_frequencies(tiny):
    with torch.device("meta"):
        model = Decoder(tiny())
    model.to_empty(device="cpu")
    assert torch.equal(model.model.rotary.frequencies, RotaryEmbedding(tiny()).frequencies)


def test_scores_depend_on_the_distance_only(tiny):
    rotary = RotaryEmbedding(tiny())
    q, k = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(0))

    def score(at: int, other: int) -> torch.Tensor:
        turned = [rotate(x, *rotary(torch.tensor([[p]])), "half") for x, p in ((q, at), (k, other))]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(score(9, 4), score(105, 100), rtol=1e-4, atol=1e-5)
