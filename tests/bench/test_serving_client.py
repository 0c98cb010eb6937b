"""Users of a server whose delays are known: what they ask, when, and what they make of the answers."""

import asyncio
import json
import sys
from pathlib import Path
from statistics import median

import pytest

from modicum.bench.serving_client import Target, run_arrivals, run_users
from modicum.bench.serving_load import Asked
from modicum.bench.serving_process import running

STUB = Path(__file__).with_name("stub_server.py")
ASKED = [Asked([1, 2, number], 6) for number in range(9)]


@pytest.fixture
def stub():
    """A function: one run of users, or of requests that come by themselves, at a stub with these settings."""

    def stub(asked=ASKED, *, users=None, **settings):
        pairs = [f"{name}={value}" for name, value in settings.items()]
        with running([sys.executable, str(STUB), *pairs], threads=1) as server:
            target = Target(f"http://{server.host}", "stub", [0, 5])
            work = run_arrivals(target, asked) if users is None else run_users(target, asked, users)
            return asyncio.run(work)

    return stub


def waits(answers):
    return [answer.pieces[0] - answer.due for answer in answers]


def gaps(answers):
    return [after - before for a in answers for before, after in zip(a.pieces, a.pieces[1:], strict=False)]


def test_the_first_wait_and_the_gaps_are_those_of_the_server(stub):
    answers = stub(users=3, first=0.2, between=0.05)
    assert [answer.fault for answer in answers] == [None] * 9
    assert min(waits(answers)) >= 0.2
    assert median(waits(answers)) < 0.3
    assert median(gaps(answers)) == pytest.approx(0.05, abs=0.02)
    assert [len(answer.pieces) for answer in answers] == [6] * 9
    assert all(answer.ended >= answer.pieces[-1] for answer in answers)


def test_each_user_asks_again_when_answered_and_no_sooner(stub):
    answers = stub(users=3, first=0.1)
    moments = sorted([(a.due, 1) for a in answers] + [(a.ended, -1) for a in answers])
    at_once, most = 0, 0
    for _, step in moments:
        at_once += step
        most = max(most, at_once)
    assert most == 3
    assert len(answers) == 9


def test_requests_that_come_by_themselves_wait_from_their_own_moment(stub):
    """One slot, so that each waits for those before it: a client that sent late would not see it."""
    asked = [Asked([1], 2, at) for at in (0.0, 0.01, 0.02, 0.5)]
    found = sorted(stub(asked, slots=1, first=0.1), key=lambda answer: answer.due)
    start = found[0].due
    assert [answer.due - start for answer in found] == pytest.approx([0.0, 0.01, 0.02, 0.5])
    assert waits(found) == pytest.approx([0.1, 0.19, 0.28, 0.1], abs=0.06)


def test_every_request_is_greedy_streamed_and_goes_on_past_an_end(stub, tmp_path):
    log = tmp_path / "log"
    stub(users=2, log=log)
    said = [json.loads(line) for line in log.read_text().splitlines()]
    assert sorted(one["prompt"] for one in said) == [one.prompt for one in ASKED]
    for one in said:
        assert (one["model"], one["max_tokens"], one["temperature"], one["stream"]) == ("stub", 6, 0, True)
        assert one["stream_options"] == {"include_usage": True}
        assert one["ignore_eos"]
        assert one["logit_bias"] == {"0": -100, "5": -100}


def test_tokens_are_those_of_the_usage_whatever_a_piece_holds(stub):
    answers = stub(users=3, tokens=3)
    assert [(answer.tokens, len(answer.pieces)) for answer in answers] == [(6, 2)] * 9


@pytest.mark.parametrize(
    ("settings", "fault", "how_many"),
    [
        ({"refuse": 3}, "status 503: too many", 3),
        ({"broken": 3}, "inside a stream: out of luck", 3),
        ({"short": 2}, "an answer that is shorter than was asked for, or has no usage", 9),
    ],
)
def test_what_goes_wrong_is_told_of_that_request_alone(stub, settings, fault, how_many):
    faults = [answer.fault for answer in stub(users=3, **settings)]
    assert faults.count(fault) == how_many
    assert faults.count(None) == 9 - how_many


def test_a_server_that_goes_away_ends_the_run_with_faults(stub):
    answers = stub(users=2, die=3)
    assert len(answers) == 9
    assert sum(answer.fault is None for answer in answers) <= 2
