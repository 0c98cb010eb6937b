from collections import Counter
from fractions import Fraction
from math import ceil, floor, inf

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from modicum.data import Mixture
from modicum.store import UserError

seeds = st.integers(0, 2**32 - 1)
sizes = st.lists(st.integers(1, 40), min_size=1, max_size=5)
decimals = st.integers(1, 400).map(lambda hundredths: hundredths / 100)


def named(values: list) -> dict:
    return {f"source-{i}": value for i, value in enumerate(values)}


@given(sizes, seeds, st.integers(1, 3))
def test_every_window_is_seen_exactly_once_an_epoch_whatever_the_mixture(sizes: list, seed: int, passes: int) -> None:
    windows = named(sizes)
    mixture = Mixture(windows, seed=seed)
    every = Counter({(name, i): 1 for name, size in windows.items() for i in range(size)})
    for p in range(passes):
        assert Counter(mixture.rows(p * sum(sizes), sum(sizes))) == every


@given(st.lists(st.tuples(st.integers(1, 40), decimals), min_size=1, max_size=4), seeds, st.integers(1, 4))
def test_a_weighted_source_is_seen_weight_times_a_pass(sources: list, seed: int, passes: int) -> None:
    windows, weights = named([size for size, _ in sources]), named([weight for _, weight in sources])
    owed = {name: Fraction(str(weights[name])) * size * passes for name, size in windows.items()}
    rows = sum(floor(share + Fraction(1, 2)) for share in owed.values())
    seen = Counter(Mixture(windows, seed=seed, weights=weights).rows(0, rows))
    for name, size in windows.items():
        times = [seen[name, i] for i in range(size)]
        assert sum(times) in (floor(owed[name]), ceil(owed[name]))
        # a source's own epochs follow one another: no window is seen again before all have been
        assert max(times) - min(times) <= 1


@given(st.lists(st.tuples(st.integers(1, 60), decimals), min_size=1, max_size=5), seeds, st.integers(0, 300))
def test_rows_come_in_the_order_in_which_they_are_due(sources: list, seed: int, first: int) -> None:
    windows, weights = named([size for size, _ in sources]), named([weight for _, weight in sources])
    events = sorted(
        (Fraction(2 * turn + 1) / (2 * Fraction(str(weights[name])) * size), name)
        for name, size in windows.items()
        for turn in range(first + 20)
    )
    mixture = Mixture(windows, seed=seed, weights=weights)
    assert [name for name, _ in mixture.rows(first, 20)] == [name for _, name in events[first : first + 20]]
    before = Counter(name for _, name in events[:first])
    assert mixture.counts(first) == [before[name] for name in sorted(windows)]


@given(st.lists(st.tuples(st.integers(1, 60), decimals), min_size=1, max_size=5), seeds, st.data())
def test_row_k_is_a_function_of_seed_and_k_alone(sources: list, seed: int, data: st.DataObject) -> None:
    mixture = Mixture(named([size for size, _ in sources]), seed=seed, weights=named([weight for _, weight in sources]))
    rows = mixture.rows(0, 60)
    first = data.draw(st.integers(0, 59))
    count = data.draw(st.integers(0, 60 - first))
    assert mixture.rows(first, count) == rows[first : first + count]


@given(sizes.filter(lambda sizes: len(sizes) > 1))
def test_sources_interleave_evenly(sizes: list) -> None:
    windows = named(sizes)
    mixture = Mixture(windows, seed=0)
    for rows in range(sum(sizes)):
        for name, count in zip(sorted(windows), mixture.counts(rows), strict=True):
            # never more than half a row for each source away from its share
            assert abs(count - rows * windows[name] / sum(sizes)) <= len(sizes) / 2 + 0.5


def test_each_epoch_and_each_seed_has_another_order() -> None:
    epochs = [tuple(Mixture({"a": 50}, seed=seed).rows(50 * epoch, 50)) for seed in range(4) for epoch in range(25)]
    assert len(set(epochs)) == 100
    assert len({frozenset(epoch) for epoch in epochs}) == 1


def test_two_sources_of_one_size_have_different_orders() -> None:
    rows = Mixture({"a": 50, "b": 50}, seed=0).rows(0, 100)
    assert [window for name, window in rows if name == "a"] != [window for name, window in rows if name == "b"]


def test_adding_a_source_keeps_the_order_within_the_others() -> None:
    def order_of_a(windows: dict[str, int]) -> list[int]:
        rows = Mixture(windows, seed=9).rows(0, 60)
        return [window for name, window in rows if name == "a"][:20]

    assert order_of_a({"a": 20}) == order_of_a({"a": 20, "b": 20})


@given(st.lists(st.tuples(st.integers(1, 30), decimals, st.none() | decimals), min_size=1, max_size=4))
@example([(100, 1.0, 0.29)])  # 0.29 · 100 is less than 29 in binary fractions
@example([(5, 1.0, 1.0), (5, 1.0, None)])  # both sources' rows are due at once
@example([(5, 1.0, None), (5, 1.0, 1.0)])
def test_the_longest_run_is_the_last_one_within_max_epochs(sources: list) -> None:
    windows, weights = named([source[0] for source in sources]), named([source[1] for source in sources])
    most = {f"source-{i}": source[2] for i, source in enumerate(sources) if source[2] is not None}
    mixture = Mixture(windows, seed=0, weights=weights, max_epochs=most)
    longest = mixture.rows_available
    if longest is None:
        assert not most
        mixture.check(10**6, batch_size=1)
        return
    assert all(epochs <= most.get(name, inf) for name, epochs in mixture.epochs(longest).items())
    assert any(epochs > most.get(name, inf) for name, epochs in mixture.epochs(longest + 1).items())
    mixture.check(longest, batch_size=1)
    with pytest.raises(UserError):
        mixture.check(longest + 1, batch_size=1)


def test_a_run_beyond_max_epochs_is_refused_with_the_source_and_the_mend() -> None:
    mixture = Mixture({"books": 100, "notes": 10}, seed=0, weights={"notes": 5}, max_epochs={"notes": 4, "books": 4})
    # one pass is 150 rows: 100 of books and 50 of notes, which is 5 epochs of notes
    with pytest.raises(UserError) as caught:
        mixture.check(160, batch_size=16)
    message = str(caught.value)
    assert "source notes: 10 steps see it 5.30 times, and its max_epochs is 4" in message
    assert "books" not in message
    assert "take at most 7 steps (of 16 sequences)" in message
    assert "raise their max_epochs" in message
    mixture.check(7 * 16, batch_size=16)
    assert mixture.epochs(150) == {"books": 1.0, "notes": 5.0}
    assert mixture.rows_per_pass == 150


def test_a_weight_for_a_source_without_tokens_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"source wiki has a weight but no tokens in the shards \(they hold books\)"):
        Mixture({"books": 3}, seed=0, weights={"books": 1, "wiki": 1})


def test_no_source_at_all_is_refused() -> None:
    with pytest.raises(UserError, match="hold no tokens"):
        Mixture({}, seed=0)


@pytest.mark.parametrize("weight", [0.0, -1.0, inf, float("nan")])
def test_a_weight_must_be_a_positive_number(weight: float) -> None:
    with pytest.raises(ValueError, match="weight of source a"):
        Mixture({"a": 3}, seed=0, weights={"a": weight})
