import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from modicum.corpus import read_documents
from modicum.corpus.chunks import hash_pair, split_key
from modicum.corpus.decide import heldout_threshold

KEYS = st.lists(st.integers(0, 2**64 - 1) | st.integers(2**63, 2**64 - 1), max_size=40)
FRACTION = st.floats(0.001, 0.49)


def threshold(keys, fraction, block=7):
    return heldout_threshold((np.array(keys[i : i + block], np.uint64) for i in range(0, len(keys), block)), fraction)


@given(KEYS, FRACTION, st.randoms())
def test_the_split_does_not_depend_on_the_order_of_documents(keys, fraction, draw):
    shuffled = list(keys)
    draw.shuffle(shuffled)
    assert threshold(shuffled, fraction, 3) == threshold(keys, fraction)


@given(KEYS, FRACTION)
@example([2**63, 2**63 + 1], 0.1)
@example([1, 2], 0.1)
@example([7, 7], 0.1)
def test_of_different_documents_some_are_held_out_and_some_are_not(keys, fraction):
    held_out = [key for key in keys if key < threshold(keys, fraction)]
    assert bool(held_out) == (len(set(keys)) > 1)
    assert len(held_out) < len(keys) or not keys


@given(KEYS, FRACTION)
def test_a_document_is_held_out_by_its_own_key_unless_that_left_one_side_empty(keys, fraction):
    plain = [key for key in keys if key < int(fraction * 2**64)]
    if 0 < len(plain) < len(keys):
        assert [key for key in keys if key < threshold(keys, fraction)] == plain


def test_no_fraction_holds_out_nothing():
    assert threshold([1, 2, 3], 0.0) == 0


def test_split_keys_spread_evenly_and_depend_on_the_seed():
    keys = np.array([[split_key(hash_pair(f"text {i}"), seed) for i in range(4000)] for seed in (0, 1)], np.float64)
    for row in keys / 2**64:
        counts = np.histogram(row, bins=10, range=(0, 1))[0]
        assert abs(counts - 400).max() < 80  # four standard deviations
    assert abs(np.corrcoef(keys)[0, 1]) < 0.06


def test_about_the_wanted_share_is_held_out_and_adding_documents_moves_none(write_lines, prepare, prose):
    texts = [prose(k, 20) for k in range(600)]
    first, report = prepare(write_lines("a.jsonl", texts[:400]), out="first", heldout_fraction=0.1)
    second, _ = prepare(write_lines("b.jsonl", texts[::-1]), out="second", heldout_fraction=0.1)
    assert 20 <= report.documents_heldout <= 60
    held_out = {document.text for document in read_documents(first, "heldout")}
    assert held_out == {document.text for document in read_documents(second, "heldout")} & set(texts[:400])


@pytest.mark.parametrize("seed", [0, 1])
def test_another_seed_draws_another_split(write_lines, prepare, prose, seed):
    path = write_lines("a.jsonl", [prose(k, 20) for k in range(100)])
    out, _ = prepare(path, seed=seed, out="one", heldout_fraction=0.2)
    other, _ = prepare(path, seed=seed + 1, out="other", heldout_fraction=0.2)
    assert {d.text for d in read_documents(out, "heldout")} != {d.text for d in read_documents(other, "heldout")}
