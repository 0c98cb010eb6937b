"""What is asked of servers: the same of all, by a seed; lengths from the mix; arrivals of a Poisson process."""

from itertools import combinations, pairwise
from math import exp

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modicum.bench.serving_load import Load, Mix, arrivals, draw_requests

IDS = range(10, 400)


def draw(count=40, mix=None, seed=0, **options):
    return draw_requests(count, mix or Mix((20,), (4,)), IDS, start=1, seed=seed, **options)


@given(st.integers(1, 200), st.floats(0.01, 1000), st.integers())
def test_arrivals_are_so_many_and_in_their_order(count, rate, seed):
    moments = arrivals(count, rate, seed=seed)
    assert len(moments) == count
    assert all(0 <= before <= after for before, after in pairwise([0.0, *moments]))


def test_gaps_between_arrivals_have_the_law_of_a_poisson_process():
    gaps = np.diff(arrivals(20_001, 4.0, seed=7))
    assert gaps.mean() == pytest.approx(1 / 4, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 4, rel=0.05), "a steady tick has none"
    assert np.mean(gaps > 1 / 4) == pytest.approx(exp(-1), abs=0.015)
    assert np.corrcoef(gaps[:-1], gaps[1:])[0, 1] == pytest.approx(0, abs=0.03), "a gap knows nothing of the last"


def test_a_seed_gives_the_same_requests_and_another_one_others():
    assert draw() == draw()
    assert draw(seed=1) != draw()
    assert [one.prompt for one in draw(rate=3.0)] == [one.prompt for one in draw()]
    assert {one.at for one in draw()} == {0.0}


def test_lengths_are_those_of_the_mix_as_often_as_they_stand_there():
    asked = draw(4000, Mix((16, 16, 16, 64), (2, 9)))
    lengths = [len(one.prompt) for one in asked]
    assert set(lengths) == {16, 64}
    assert lengths.count(16) / 4000 == pytest.approx(3 / 4, abs=0.03)
    assert sum(one.tokens == 9 for one in asked) / 4000 == pytest.approx(1 / 2, abs=0.03)


def test_prompts_begin_alike_only_where_that_is_asked_for():
    def longest_common(asked):
        def common(a, b):
            return next((place for place, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]), len(a))

        return [common(a.prompt, b.prompt) for a, b in combinations(asked, 2)]

    assert max(longest_common(draw())) < 5
    shared = draw(mix=Mix((20,), (4,), shared=12))
    assert 12 <= min(longest_common(shared)) <= max(longest_common(shared)) < 16
    assert all(one.prompt[0] == 1 and set(one.prompt[1:]) <= set(IDS) for one in [*shared, *draw()])


def test_a_load_says_how_many_it_is_and_takes_at_most_sixteen_slots():
    loads = [Load(1), Load(4), Load(64), Load(rate=2.5)]
    assert [load.words() for load in loads] == ["1 user", "4 users", "64 users", "2.5 requests/s"]
    assert [load.slots() for load in loads] == [1, 4, 16, 16]
    assert [load.requests() for load in loads] == [32, 32, 192, 64]
