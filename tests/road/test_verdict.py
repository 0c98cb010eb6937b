"""The sentences follow from the numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modicum.road.report.verdict import answer_verdict, bits_verdict, choice_verdict


def result(low, high, *, chance=0.25, majority=0.27, overlap=0.35):
    return {"low": low, "high": high, "chance": chance, "majority": majority, "word_overlap": overlap}


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (0.20, 0.30, "Not distinguishable from chance (25.0 %)"),
        (0.25, 0.33, "Not distinguishable from chance"),
        (0.10, 0.20, "Below chance"),
        (0.26, 0.33, "but below counting shared words (35.0 %)"),
        (0.30, 0.40, "but not distinguishable from counting shared words"),
        (0.36, 0.50, "above both baselines"),
    ],
)
def test_a_score_claims_no_more_than_its_interval(low, high, words):
    assert words in choice_verdict(result(low, high))


@given(st.lists(st.floats(0, 1), min_size=3, max_size=3).map(sorted), st.floats(0, 1), st.floats(0, 1))
def test_a_score_whose_interval_covers_chance_is_never_called_better(span, majority, overlap):
    low, chance, high = span
    verdict = choice_verdict(result(low, high, chance=chance, majority=majority, overlap=overlap))
    assert verdict.startswith("Not distinguishable from chance")


def test_bits_per_byte_before_and_after():
    assert bits_verdict(4.0, 2.0, None) == "Pretraining brought it down from 4.00, by 50.0 %."
    assert bits_verdict(4.0, 2.0, 2.2).endswith("tuning on conversations raised it to 2.20.")
    assert bits_verdict(4.0, 2.0, 1.9).endswith("tuning on conversations brought it to 1.90.")
    assert bits_verdict(4.0, 4.1, None).startswith("Pretraining did not help")


def nats(value):
    return {"nats_per_token": value, "low": value - 0.1, "high": value + 0.1}


def test_answers_that_ignore_their_prompt_are_called_that():
    assert answer_verdict(nats(3.0), nats(2.0), nats(2.5)).endswith("it reads the prompt.")
    assert "33.3 % lower" in answer_verdict(nats(3.0), nats(2.0), nats(2.5))
    assert answer_verdict(nats(3.0), nats(2.0), nats(2.15)).endswith("but their intervals overlap.")
    assert answer_verdict(nats(3.0), nats(2.0), nats(2.0)).endswith("it does not read the prompt.")
    assert "no lower than the base model’s" in answer_verdict(nats(2.0), nats(2.1), nats(2.5))
    assert answer_verdict(nats(3.0), nats(2.0), None) == (
        "On held-out answers its loss is 33.3 % lower than the base model’s."
    )


def test_a_checkpoint_that_was_taken_over_as_it_is_makes_no_claim_about_pretraining():
    text = bits_verdict(None, 1.9, 1.8)
    assert text == "The starting checkpoint was not pretrained further; tuning on conversations brought it to 1.80."
    assert bits_verdict(None, 1.9, None) == "The starting checkpoint was not pretrained further."
