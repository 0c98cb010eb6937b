"""Plots: PNG pictures in two inkings, none where there is nothing to draw."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modicum.road.report.plots import smooth, stage_pictures


def pixels_across(png):
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">I", png[16:20])[0]


def test_a_stage_has_three_pictures_for_light_dark_and_narrow_screens(figures):
    loss, rate, speed = stage_pictures("pretrain", figures["training"]["pretrain"]["curve"])
    assert [picture.name for picture in (loss, rate, speed)] == [
        "pretrain-loss",
        "pretrain-learning-rate",
        "pretrain-speed",
    ]
    assert loss.alternative == "Loss over 295 updates, from 8.30 to 3.11, held-out 3.30"
    assert list(loss.instead) == [
        "(prefers-color-scheme: dark) and (max-width: 34rem)",
        "(max-width: 34rem)",
        "(prefers-color-scheme: dark)",
    ]
    assert loss.png != loss.instead["(prefers-color-scheme: dark)"]
    assert pixels_across(loss.png) > 2 * pixels_across(loss.instead["(max-width: 34rem)"]) - 20
    assert pixels_across(rate.png) == pixels_across(speed.png)


def test_equal_curves_give_equal_bytes(figures):
    curve = figures["training"]["sft"]["curve"]
    assert stage_pictures("sft", curve) == stage_pictures("sft", curve)


@pytest.mark.parametrize("steps", [[], [0]])
def test_a_run_that_logged_less_than_twice_has_no_pictures(steps):
    curve = {
        "steps": steps,
        "loss": [1.0] * len(steps),
        "learning_rate": [1.0] * len(steps),
        "speed": {"steps": steps, "tokens_per_second": [1.0] * len(steps)},
        "heldout": {"steps": [], "loss": []},
    }
    assert stage_pictures("pretrain", curve) == []


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=200))
def test_smoothing_keeps_length_ends_and_bounds(values):
    smoothed = smooth(values)
    assert len(smoothed) == len(values)
    assert (smoothed[0], smoothed[-1]) == (values[0], values[-1])
    assert min(values) - 1e-9 <= min(smoothed) <= max(smoothed) <= max(values) + 1e-9


def test_smoothing_is_a_centred_mean():
    assert smooth([0.0, 3.0, 6.0, 0.0], share=0.26) == [0.0, 3.0, 3.0, 0.0]
