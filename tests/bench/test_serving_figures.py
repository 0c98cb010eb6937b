"""Percentiles and speeds of answers whose moments are known."""

import pytest

from modicum.bench.serving_client import Answered
from modicum.bench.serving_figures import figures
from modicum.store import UserError


def answered(due, *pieces, tokens=None, fault=None):
    return Answered(due, list(pieces), pieces[-1] if pieces else due, tokens or len(pieces), fault)


def test_speed_is_all_tokens_from_the_first_request_to_the_last_end():
    found = figures([answered(10.0, 11.0, 12.0, tokens=30), answered(11.0, 12.0, 15.0, tokens=70)])
    assert found["tokens_per_s"] == 100 / 5
    assert found["tokens_per_piece"] == 100 / 4
    assert (found["requests"], found["errors"], found["faults"]) == (2, 0, {})


def test_waits_are_percentiles_of_answers_and_of_the_gaps_within_them():
    """First pieces after 1 to 101 ms; the gaps between pieces, in each answer 5 and 105 ms."""
    waits = [place / 1000 for place in range(1, 102)]
    found = figures([answered(7.0, 7.0 + wait, 7.005 + wait, 7.11 + wait) for wait in waits])
    assert [found[f"first_token{which}_ms"] for which in ("", "_p95", "_p99")] == pytest.approx([51, 96, 100])
    assert [found[f"between_tokens{which}_ms"] for which in ("", "_p95", "_p99")] == pytest.approx([55, 105, 105])


def test_what_failed_is_counted_by_its_cause_and_measured_in_nothing_else():
    good, bad = answered(0.0, 1.0, 2.0), answered(0.0, 0.001, 0.002, tokens=1000, fault="status 503: too many")
    found = figures([good, bad, bad])
    alone = figures([good])
    assert (found["requests"], found["errors"], found["faults"]) == (3, 2, {"status 503: too many": 2})
    assert {name: found[name] for name in found if name not in ("requests", "errors", "faults")} == {
        name: alone[name] for name in alone if name not in ("requests", "errors", "faults")
    }


def test_an_answer_without_text_has_tokens_and_no_times():
    found = figures([answered(0.0, 1.0, 2.0), Answered(0.0, [], 4.0, tokens=6)])
    assert (found["tokens_per_s"], found["tokens_per_piece"]) == (8 / 4, 8 / 2)
    assert (found["first_token_p99_ms"], found["between_tokens_p99_ms"]) == (1000, 1000)
    assert found["errors"] == 0


def test_where_nothing_can_be_measured_the_cause_is_told():
    with pytest.raises(UserError, match="no request was answered: no luck"):
        figures([answered(0.0, fault="no luck")])
    with pytest.raises(UserError, match="no answer came in several pieces"):
        figures([answered(0.0, 1.0)])
