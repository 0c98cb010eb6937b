"""Rounding against what NumPy finds by trying."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modicum.quantize.rounding import round_matrix


def matrix(outputs, inputs, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((outputs, inputs)).astype(np.float32))


def error(weight, rounded):
    wide = rounded.values.double().numpy() * np.repeat(
        rounded.scale.double().numpy(), weight.shape[1] // rounded.scale.shape[1], axis=1
    )
    return weight.double().numpy() - wide


@pytest.mark.parametrize("bits", [4, 8])
def test_a_searched_scale_errs_less_than_the_one_that_holds_the_largest_weight(bits):
    weight = matrix(40, 96)
    rounded = round_matrix(weight, bits)
    groups = weight.numpy().reshape(40, 1 if bits == 8 else 3, -1)
    step = np.abs(groups).max(-1, keepdims=True) / (2 ** (bits - 1) - 1)
    plain = groups - np.rint(groups / step) * step
    assert (error(weight, rounded) ** 2).sum() < (plain**2).sum()


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    bits=st.sampled_from([4, 8]),
    size=st.floats(1e-6, 1e3),
    with_moments=st.booleans(),
)
def test_numbers_stay_in_their_range_and_scales_are_finite(seed, bits, size, with_moments):
    weight = matrix(5, 64, seed) * size
    weight[0] = 0
    weight[1, :32] = size
    x = matrix(50, 64, seed + 1)
    rounded = round_matrix(weight, bits, x.T @ x / 50 if with_moments else None)
    half = 1 << (bits - 1)
    assert rounded.values.min() >= -half
    assert rounded.values.max() <= half - 1
    assert rounded.scale.isfinite().all()
    assert (rounded.scale != 0).all()
    assert rounded.wide()[0].abs().max() <= 1e-4 * size
    if bits == 4:
        assert torch.equal(rounded.scale.half().float(), rounded.scale)


def test_errors_that_are_passed_on_leave_the_output_nearer():
    draw = np.random.default_rng(0)
    # inputs that go together, as those of a network do
    x = torch.from_numpy((draw.standard_normal((400, 16)) @ draw.standard_normal((16, 64))).astype(np.float32))
    weight = matrix(48, 64)
    moments = x.T @ x / len(x)
    nearest, passed = round_matrix(weight, 4), round_matrix(weight, 4, moments)

    def output(rounded):
        return ((x.double().numpy() @ error(weight, rounded).T) ** 2).mean()

    assert output(passed) < 0.4 * output(nearest)
    assert torch.equal(passed.scale, nearest.scale)


def test_inputs_that_have_nothing_in_common_leave_every_number_the_nearest():
    weight = matrix(16, 96)
    assert torch.equal(round_matrix(weight, 4, torch.eye(96)).values, round_matrix(weight, 4).values)


def test_inputs_that_were_never_on_do_no_harm():
    assert round_matrix(matrix(16, 64), 4, torch.zeros(64, 64)).wide().isfinite().all()
