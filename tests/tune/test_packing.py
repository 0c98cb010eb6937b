"""Packing: everything once, nothing split, the same on every machine."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modicum.tune.packing import Packing, best_fit

lengths_and_capacity = st.integers(1, 40).flatmap(
    lambda capacity: st.tuples(st.lists(st.integers(1, capacity), max_size=60), st.just(capacity))
)


@given(lengths_and_capacity, st.integers(0, 2**32 - 1), st.integers(0, 5))
def test_every_conversation_stands_in_exactly_one_row_of_an_epoch_and_no_row_overflows(case, seed, epoch):
    lengths, capacity = case
    packing = Packing(lengths, capacity)
    plan = packing.epoch(seed, epoch)
    rows = [plan.row(number) for number in range(packing.rows)]
    assert sorted(member for row in rows for member in row) == list(range(len(lengths)))
    assert all(row and sum(lengths[member] for member in row) <= capacity for row in rows)


@given(lengths_and_capacity)
def test_no_two_rows_could_have_been_one(case):
    lengths, capacity = case
    packing = Packing(lengths, capacity)
    plan = packing.epoch(0, 0)
    filled = sorted(sum(lengths[member] for member in plan.row(number)) for number in range(packing.rows))
    assert all(emptiest + next_one > capacity for emptiest, next_one in pairwise(filled))


def test_the_fullest_row_with_room_is_taken():
    # worked by hand: 6 opens row 0, 5 row 1, 4 fills row 0, 3 goes to row 1 (space 5), 2 fills it, 2 opens row 2
    assert best_fit([6, 5, 4, 3, 2, 2], 10).tolist() == [0, 1, 0, 1, 1, 2]


def test_each_epoch_has_another_order_but_as_many_rows_of_the_same_lengths():
    lengths = [3, 3, 3, 3, 5, 5, 5, 2, 2, 2, 2, 2]
    packing = Packing(lengths, 10)
    plans = [packing.epoch(7, epoch) for epoch in range(4)]
    rows = [[plan.row(number) for number in range(packing.rows)] for plan in plans]
    shapes = [[sorted(lengths[member] for member in row) for row in epoch] for epoch in rows]
    assert len({str(shape) for shape in shapes}) == 4  # the order of rows
    assert len({str(sorted(sorted(row) for row in epoch)) for epoch in rows}) == 4  # who shares one
    assert all(sorted(shape) == sorted(shapes[0]) for shape in shapes)


def test_an_epoch_is_a_function_of_seed_and_epoch_alone():
    lengths = list(range(1, 30))
    first, again = Packing(lengths, 64), Packing(lengths, 64)
    for epoch in range(3):
        again.epoch(1, epoch)  # what was asked before leaves no trace
    assert first.epoch(1, 2).members.tolist() == again.epoch(1, 2).members.tolist()
    assert first.epoch(1, 2).members.tolist() != first.epoch(2, 2).members.tolist()


def test_padding_is_counted_in_places_of_the_rows():
    assert Packing([6, 6], 10).padding_share == pytest.approx(8 / 20)
    assert Packing([5, 5], 10).padding_share == 0
    assert Packing([], 10).padding_share == 0
    assert Packing([], 10).rows == 0


def test_a_conversation_that_fits_no_row_is_refused():
    with pytest.raises(ValueError, match="1 to 10"):
        Packing([3, 11], 10)
    with pytest.raises(ValueError, match="1 to 10"):
        Packing(np.array([0]), 10)
