"""An interval is right when it holds the truth as often as it says."""

import numpy as np
import pytest

from modicum.evaluate.bootstrap import mean_interval, ratio_interval


def test_95_percent_of_the_intervals_of_binomial_samples_hold_the_truth():
    random = np.random.default_rng(0)
    hits = 0
    for seed in range(400):
        low, high = mean_interval(random.random(200) < 0.3, samples=400, seed=seed)
        hits += low <= 0.3 <= high
    # 400 tries of 0.95 have a standard deviation of 1.1 %; percentile intervals at n = 200 run about 1 % low
    assert 0.91 < hits / 400 < 0.98


def test_the_width_is_that_of_the_normal_law():
    values = np.random.default_rng(1).normal(size=2000)
    low, high = mean_interval(values, samples=4000, seed=0)
    assert high - low == pytest.approx(2 * 1.96 * values.std() / 2000**0.5, rel=0.06)


def test_a_ratio_weighs_units_by_their_denominators():
    random = np.random.default_rng(2)
    sizes = random.integers(1, 1000, 500)
    low, high = ratio_interval(sizes * 2.5, sizes, samples=200, seed=0)
    assert low == pytest.approx(2.5)
    assert high == pytest.approx(2.5)


def test_the_seed_decides_the_interval_and_memory_slices_do_not(monkeypatch):
    values = np.random.default_rng(3).random(50)
    first = mean_interval(values, samples=100, seed=5)
    assert mean_interval(values, samples=100, seed=5) == first
    assert mean_interval(values, samples=100, seed=6) != first
    monkeypatch.setattr("modicum.evaluate.bootstrap._CELLS", 7 * 50)
    assert mean_interval(values, samples=100, seed=5) == first


def test_one_unit_has_an_interval_of_no_width():
    assert mean_interval([0.25], samples=10, seed=0) == (0.25, 0.25)


def test_no_units_and_nothing_to_divide_by_are_mistakes():
    with pytest.raises(ValueError, match="as many numerators"):
        mean_interval([], samples=10, seed=0)
    with pytest.raises(ValueError, match="nothing to divide by"), np.errstate(all="ignore"):
        ratio_interval([1.0], [0.0], samples=10, seed=0)
