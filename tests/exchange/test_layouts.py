import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modicum.exchange.layouts import relaid, to_half, to_interleaved

SHAPES = {"heads": st.integers(1, 4), "pairs": st.integers(1, 5), "seed": st.integers(0, 2**16)}


def turned(x, positions, interleaved):
    """(T, width) rotated by its positions, each channel pair as one complex number; float64."""
    width = x.shape[1]
    first, second = (x[:, 0::2], x[:, 1::2]) if interleaved else (x[:, : width // 2], x[:, width // 2 :])
    return (first + 1j * second) * np.exp(1j * positions[:, None] * 100.0 ** (-np.arange(width // 2) / width))


@given(**SHAPES)
def test_relaid_rows_give_the_same_scores_at_every_distance(heads, pairs, seed):
    draw = np.random.default_rng(seed)
    width, positions = 2 * pairs, np.arange(7)
    x = draw.normal(size=(7, 5))
    q, k = draw.normal(size=(2, heads * width, 5))
    q_half, k_half = (to_half(torch.from_numpy(rows), width).numpy() for rows in (q, k))
    for head in range(heads):
        at = slice(head * width, (head + 1) * width)
        wanted = turned(x @ q[at].T, positions, True) @ turned(x @ k[at].T, positions, True).conj().T
        found = turned(x @ q_half[at].T, positions, False) @ turned(x @ k_half[at].T, positions, False).conj().T
        np.testing.assert_allclose(found.real, wanted.real, atol=1e-12)


@given(**SHAPES, matrix=st.booleans(), dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
def test_each_way_undoes_the_other_bit_for_bit(heads, pairs, seed, matrix, dtype):
    shape = (heads * 2 * pairs, 3) if matrix else (heads * 2 * pairs,)
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    assert torch.equal(to_interleaved(to_half(rows, 2 * pairs), 2 * pairs), rows)
    assert torch.equal(to_half(to_interleaved(rows, 2 * pairs), 2 * pairs), rows)


def test_a_heads_first_channels_of_each_pair_come_first():
    assert to_half(torch.arange(12), 6).tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]


@pytest.mark.parametrize(
    ("name", "moves"),
    [
        ("model.layers.0.self_attn.q_proj.weight", True),
        ("model.layers.0.self_attn.k_proj.bias", True),
        ("model.layers.0.self_attn.q_norm.weight", True),
        ("model.layers.0.self_attn.v_proj.weight", False),
        ("model.layers.0.self_attn.o_proj.weight", False),
        ("model.layers.0.mlp.up_proj.weight", False),
    ],
)
def test_only_what_is_rotated_moves(name, moves):
    rows = torch.arange(8.0)
    (found,) = relaid({name: rows}, head_dim=4, source="interleaved", target="half").values()
    assert (found.tolist() != rows.tolist()) == moves
    assert relaid({name: rows}, head_dim=4, source="half", target="half")[name] is rows
