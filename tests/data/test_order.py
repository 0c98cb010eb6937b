import hashlib
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modicum.data import Permutation, order_key
from modicum.data.order import things_at

keys = st.integers(0, 2**64 - 1)


@given(st.integers(1, 3000), keys)
def test_an_order_holds_every_thing_exactly_once(size: int, key: int) -> None:
    assert np.array_equal(np.sort(Permutation(size, key)(np.arange(size))), np.arange(size))


@given(st.integers(1, 2**40), keys, st.data())
def test_any_place_can_be_asked_for_alone(size: int, key: int, data: st.DataObject) -> None:
    order = Permutation(size, key)
    places = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20, unique=True)))
    together = order(places)
    assert [int(order(places[i : i + 1])[0]) for i in range(len(places))] == together.tolist()
    assert len(set(together.tolist())) == len(places)
    assert together.min() >= 0
    assert together.max() < size


@given(st.lists(st.tuples(st.integers(1, 100), keys, st.integers(0, 10**6)), min_size=1, max_size=30))
def test_places_of_many_orders_can_be_asked_for_together(asked: list[tuple[int, int, int]]) -> None:
    sizes = np.array([size for size, _, _ in asked])
    places = np.array([number % size for size, _, number in asked])
    together = things_at(places, sizes, np.array([key for _, key, _ in asked], np.uint64))
    alone = [Permutation(size, key)(places[i : i + 1])[0] for i, (size, key, _) in enumerate(asked)]
    assert together.tolist() == alone


def test_the_order_is_the_same_on_every_machine_and_version() -> None:
    # worked out with Python's own integers, independent of NumPy
    size, key = 10, order_key(3, "source", 2)
    assert Permutation(size, key)(np.arange(size)).tolist() == [_by_hand(place, size, key) for place in range(size)]
    assert key == int.from_bytes(hashlib.sha256(b'[3, "source", 2]').digest()[:8], "little")


def test_all_orders_of_few_things_are_equally_likely() -> None:
    counts: dict[tuple[int, ...], int] = {}
    for key in range(2400):
        order = tuple(Permutation(4, order_key(key))(np.arange(4)).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24
    chi_square = sum((count - 100) ** 2 / 100 for count in counts.values())
    assert chi_square < 49.7  # 23 degrees of freedom, p = 0.001


def test_orders_of_different_keys_agree_as_often_as_chance() -> None:
    size, trials = 1000, 100
    identity = np.arange(size)
    orders = [Permutation(size, order_key("seed", i))(identity) for i in range(trials)]
    agreements = [int((a == b).sum()) for a, b in pairwise(orders)]
    # the number of equal places of two random orders is Poisson with mean 1
    assert 0.6 < np.mean(agreements) < 1.4
    assert max(agreements) < 10
    correlations = [abs(np.corrcoef(identity, order)[0, 1]) for order in orders]
    assert max(correlations) < 5 / np.sqrt(size)


def test_neighbours_do_not_stay_neighbours() -> None:
    order = Permutation(10_000, order_key(0))(np.arange(10_000))
    close = int((np.abs(np.diff(order)) < 10).sum())
    assert close < 60  # expected: 10,000 · 18/10,000 = 18


def test_a_place_outside_the_order_is_refused() -> None:
    for place in (-1, 5):
        with pytest.raises(IndexError):
            Permutation(5, 0)(np.array([place]))
    with pytest.raises(ValueError, match="at least one"):
        Permutation(0, 0)


def _mix(x: int) -> int:
    mask = 2**64 - 1
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def _by_hand(place: int, size: int, key: int) -> int:
    """SplitMix64's stream from `key` gives the round keys; the rectangle is the smallest near-square one that fits."""
    columns = next(c for c in range(1, size + 1) if c * c >= size)
    rows = -(-size // columns)
    stream = [_mix((key + (i + 1) * 0x9E3779B97F4A7C15) % 2**64) for i in range(16)]
    while True:
        row, column = divmod(place, columns)
        for i in range(0, 16, 2):
            row = (row + _mix(column ^ stream[i]) % rows) % rows
            column = (column + _mix(row ^ stream[i + 1]) % columns) % columns
        place = row * columns + column
        if place < size:
            return place
