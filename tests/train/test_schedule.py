from itertools import pairwise
from math import cos, pi

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modicum.train.schedule import Schedule, warmup_cosine, warmup_stable_decay


def test_the_first_update_moves_and_the_last_one_still_does():
    for rates in (
        [warmup_stable_decay(s, peak=1.0, final=0.0, warmup=10, decay=20, total=100) for s in range(100)],
        [warmup_cosine(s, peak=1.0, final=0.0, warmup=10, total=100) for s in range(100)],
    ):
        assert rates[0] == 0.1
        assert rates[9] == max(rates) == 1.0
        assert 0 < rates[-1] < 0.05


def test_the_plateau_is_flat_and_the_cooldown_a_straight_line():
    rates = [warmup_stable_decay(s, peak=2.0, final=0.2, warmup=10, decay=20, total=100) for s in range(100)]
    assert set(rates[9:80]) == {2.0}
    steps = [a - b for a, b in pairwise(rates[79:])]
    assert steps == pytest.approx([1.8 / 21] * 20)
    assert rates[-1] == pytest.approx(0.2 + 1.8 / 21)


def test_the_cosine_is_half_way_down_at_its_middle():
    rates = [warmup_cosine(s, peak=1.0, final=0.5, warmup=0, total=99) for s in range(99)]
    assert rates[49] == pytest.approx(0.75)
    assert rates[24] == pytest.approx(0.5 + 0.5 * (1 + cos(pi / 4)) / 2)


@pytest.mark.parametrize("total", [1, 2, 7])
def test_phases_that_do_not_fit_are_refused(total):
    with pytest.raises(ValueError, match="do not fit"):
        warmup_stable_decay(0, peak=1.0, final=0.0, warmup=5, decay=4, total=total)
    with pytest.raises(ValueError, match="does not fit"):
        warmup_cosine(0, peak=1.0, final=0.0, warmup=total + 1, total=total)


@given(
    kind=st.sampled_from(["cosine", "wsd"]),
    total=st.integers(1, 400),
    warmup=st.floats(0, 1),
    decay=st.floats(0, 1),
    final=st.floats(0, 1),
)
def test_every_update_of_every_run_moves_and_none_above_the_peak(kind, total, warmup, decay, final):
    decay = min(decay, 1 - warmup)
    schedule = Schedule(kind, 3e-3, final_fraction=final, warmup_fraction=warmup, decay_fraction=decay)
    for step in {0, total // 3, total // 2, total - 1}:
        assert 0 < schedule.rate(step, total) <= 3e-3 * (1 + 1e-12)


def test_the_fractions_are_shares_of_the_whole_run():
    schedule = Schedule("wsd", 1.0, warmup_fraction=0.1, decay_fraction=0.3)
    rates = [schedule.rate(s, 50) for s in range(50)]
    assert [s for s, rate in enumerate(rates) if rate == 1.0] == list(range(4, 35))
