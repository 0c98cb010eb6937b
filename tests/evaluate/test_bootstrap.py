"""An interval is right when it holds the truth as often as it says."""

from math import comb

import numpy as np
import pytest

from modicum.evaluate.bootstrap import ratio_interval, share_interval
from modicum.road.report.verdict import choice_verdict


def test_95_percent_of_the_intervals_of_binomial_samples_hold_the_truth():
    random = np.random.default_rng(0)
    hits = 0
    for seed in range(400):
        low, high = share_interval(random.random(200) < 0.3, samples=400, seed=seed)
        hits += low <= 0.3 <= high
    # 400 tries of 0.95 have a standard deviation of 1.1 %; the continuity correction at n = 200 adds about 1 %
    assert 0.91 < hits / 400 < 0.98


def test_the_width_is_that_of_the_normal_law():
    values = np.random.default_rng(1).normal(size=2000)
    low, high = ratio_interval(values, np.ones_like(values), samples=4000, seed=0)
    assert high - low == pytest.approx(2 * 1.96 * values.std() / 2000**0.5, rel=0.06)


def test_a_ratio_weighs_units_by_their_denominators():
    random = np.random.default_rng(2)
    sizes = random.integers(1, 1000, 500)
    low, high = ratio_interval(sizes * 2.5, sizes, samples=200, seed=0)
    assert low == pytest.approx(2.5)
    assert high == pytest.approx(2.5)


def test_the_seed_decides_the_interval_and_memory_slices_do_not(monkeypatch):
    values = np.random.default_rng(3).random(50)
    ones = np.ones_like(values)
    first = ratio_interval(values, ones, samples=100, seed=5)
    assert ratio_interval(values, ones, samples=100, seed=5) == first
    assert ratio_interval(values, ones, samples=100, seed=6) != first
    monkeypatch.setattr("modicum.evaluate.bootstrap._CELLS", 7 * 50)
    assert ratio_interval(values, ones, samples=100, seed=5) == first


def test_one_unit_has_no_interval():
    assert ratio_interval([3.0], [2.0], samples=10, seed=0) == (None, None)


def at_least(k, n, share):
    return sum(comb(n, i) * share**i * (1 - share) ** (n - i) for i in range(k, n + 1))


def test_a_share_outside_the_interval_of_k_of_n_is_one_that_the_binomial_law_refuses():
    for n in range(1, 21):
        for k in range(n + 1):
            low, high = share_interval([1] * k + [0] * (n - k), samples=200, seed=0)
            assert 0 <= low <= k / n <= high <= 1
            for share in np.linspace(0.01, 0.99, 99):
                if share < low or share > high:
                    unlikely = at_least(k, n, share) if share < low else at_least(n - k, n, 1 - share)
                    assert unlikely < 0.0501, (k, n, share)


@pytest.mark.parametrize("marks", [[1], [0], [0.5], [0.25, 0.25], [0] * 5, [1, 1], [1 / 26]], ids=str)
def test_few_marks_that_agree_claim_nothing(marks):
    low, high = share_interval(marks, samples=100, seed=0)
    assert low <= np.mean(marks) <= high
    verdict = choice_verdict({"low": low, "high": high, "chance": 0.25, "majority": 0.3, "word_overlap": 0.3})
    assert verdict.startswith("Not distinguishable from chance")


def test_many_marks_that_agree_claim_what_they_show():
    assert share_interval([0] * 40, samples=100, seed=0)[1] < 0.25
    assert share_interval([1] * 10, samples=100, seed=0)[0] > 0.5


def test_no_units_and_nothing_to_divide_by_are_mistakes():
    with pytest.raises(ValueError, match="as many numerators"):
        share_interval([], samples=10, seed=0)
    with pytest.raises(ValueError, match="nothing to divide by"), np.errstate(all="ignore"):
        ratio_interval([1.0], [0.0], samples=10, seed=0)
