"""Figures in words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modicum.road.words import count, duration, percent, short, size, three_figures


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (512, "512"),
        (999.7, "1 k"),
        (16_384, "16.4 k"),
        (7_340_032, "7.34 M"),
        (999_999, "1 M"),
        (1.9e9, "1.9 B"),
        (3.2e12, "3.2 T"),
    ],
)
def test_large_numbers_have_three_figures(number, text):
    assert short(number) == text


@pytest.mark.parametrize(
    ("number", "text"), [(0.00734, "0.00734"), (0.0000123, "0.000012"), (1430, "1,430"), (73.26, "73.3")]
)
def test_three_figures_never_use_an_exponent(number, text):
    assert three_figures(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.3, "300 ms"),
        (4.25, "4.2 s"),
        (59.4, "59 s"),
        (59.6, "1 min 0 s"),
        (533, "8 min 53 s"),
        (3600, "1 h 0 min"),
        (12_000, "3 h 20 min"),
        (187_200, "2 d 4 h"),
    ],
)
def test_a_time_has_its_two_largest_units(seconds, text):
    assert duration(seconds) == text


def test_bytes_percentages_and_counts():
    assert [size(n) for n in (12, 999_600, 1.9e9, 2.5e12)] == ["12 B", "1 MB", "1.9 GB", "2.5 TB"]
    assert percent(0.27342) == "27.3 %"
    assert count(1234567) == "1,234,567"


@given(st.floats(min_value=1, max_value=1e14))
def test_a_shortened_number_is_within_half_a_percent_of_it(number):
    text, _, letter = short(number).partition(" ")
    scale = {"": 1, "k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}[letter]
    assert float(text.replace(",", "")) * scale == pytest.approx(number, rel=0.006)
