"""The most probable token and its logprob, in the kernel and without it, against NumPy in float64."""

import os
import signal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modicum.model import stepper
from modicum.model.native import kernel_fault

WAYS = {"kernel": stepper.greedy, "plain": stepper._greedy}


@pytest.fixture(autouse=True, scope="module")
def _loaded():
    kernel_fault()


@pytest.fixture(scope="module", params=WAYS)
def way(request):
    """Without its kernel the one would be the other."""
    if request.param == "kernel" and (fault := kernel_fault()) is not None:
        pytest.skip(fault)
    return request.param


@settings(max_examples=40)
@given(rows=st.integers(1, 5), vocabulary=st.integers(1, 90), seed=st.integers(0, 999), data=st.data())
def test_the_first_of_the_largest_that_may_be_said(way, rows, vocabulary, seed, data):
    never = sorted(data.draw(st.sets(st.integers(0, vocabulary - 1), max_size=vocabulary - 1)))
    # whole numbers: many are equal
    logits = np.random.default_rng(seed).integers(-9, 9, (rows, vocabulary)).astype(np.float32) * 2.5
    ids, logprobs, totals = WAYS[way](torch.from_numpy(logits), torch.tensor(never, dtype=torch.int64))
    exact = logits.astype(np.float64)
    wanted = np.log(np.exp(exact - exact.max(-1, keepdims=True)).sum(-1)) + exact.max(-1)
    allowed = exact.copy()
    allowed[:, never] = -np.inf
    best = allowed.argmax(-1)
    assert ids.dtype == torch.int64
    assert ids.tolist() == best.tolist()
    np.testing.assert_allclose(totals.numpy(), wanted, atol=1e-5, rtol=1e-6)
    np.testing.assert_allclose(logprobs.numpy(), exact[range(rows), best] - wanted, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 40, 44])
def test_a_row_that_is_not_finite_says_so_and_its_neighbour_does_not(way, wrong, place):
    logits = torch.randn(2, 45, generator=torch.Generator().manual_seed(0))
    logits[1, place] = wrong
    ids, logprobs, totals = WAYS[way](logits, torch.tensor([place]))
    assert logprobs.isfinite().tolist() == totals.isfinite().tolist() == [True, False]
    assert 0 <= ids.min() <= ids.max() < 45


def test_nothing_that_may_be_said_is_no_token_beyond_the_end(way):
    ids, _, _ = WAYS[way](torch.full((1, 20), -torch.inf), torch.tensor([0, 19]))
    assert 0 <= ids.item() < 20


def test_a_row_has_the_same_bits_alone():
    if (fault := kernel_fault()) is not None:
        pytest.skip(fault)
    logits = torch.randn(7, 1003, generator=torch.Generator().manual_seed(0))
    never = torch.tensor([1, 2, 500])
    together = stepper.greedy(logits, never)
    for row in range(7):
        alone = stepper.greedy(logits[row : row + 1], never)
        assert all(torch.equal(a[0], b[row]) for a, b in zip(alone, together, strict=True))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_does_not_wait_for_threads_that_its_parent_has():
    logits, before = torch.randn(4, 100, generator=torch.Generator().manual_seed(0)), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        wanted = stepper.greedy(logits, torch.tensor([3]))[0].tolist()
        if (child := os.fork()) == 0:
            signal.alarm(30)
            os._exit(stepper.greedy(logits, torch.tensor([3]))[0].tolist() != wanted)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        torch.set_num_threads(before)
