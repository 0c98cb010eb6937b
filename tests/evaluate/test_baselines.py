"""What no knowledge scores."""

import pytest

from modicum.corpus import Choice
from modicum.evaluate.baselines import chance, commonest_answer, credit, majority, word_overlap


def item(question, choices, answer):
    return Choice("id", question, choices, answer, "recall", None)


@pytest.mark.parametrize(
    ("scores", "answer", "expected"),
    [([1, 3, 2], 1, 1.0), ([1, 3, 2], 0, 0.0), ([3, 3, 2], 0, 0.5), ([3, 3, 2], 2, 0.0), ([0, 0, 0, 0], 3, 0.25)],
)
def test_choices_of_equal_score_share_the_credit(scores, answer, expected):
    assert credit(scores, answer) == expected


def test_chance_is_one_by_the_number_of_choices():
    assert chance(item("?", ["a", "b", "c"], 0)) == pytest.approx(1 / 3)


def test_the_commonest_answer_is_a_text_wherever_it_stands():
    items = [item("?", ["x", "y"], 0), item("?", ["y", "x"], 1), item("?", ["y", "z"], 0)]
    assert commonest_answer(items) == "x"
    assert [majority(one, "x") for one in items] == [1.0, 1.0, 0.5]
    assert majority(item("?", ["x", "y"], 1), "x") == 0.0


def test_of_equally_common_answers_the_first_in_the_alphabet_is_taken():
    assert commonest_answer([item("?", ["b", "c"], 0), item("?", ["a", "b"], 0)]) == "a"


def test_word_overlap_chooses_what_echoes_the_question():
    asked = "Which weakness allows SQL injection in a query?"
    assert word_overlap(item(asked, ["SQL Injection", "Race condition"], 0)) == 1.0
    assert word_overlap(item(asked, ["sql", "Race condition"], 1)) == 0.0
    assert word_overlap(item(asked, ["Off by one", "Race condition"], 1)) == 0.5


def test_a_repeated_word_counts_once():
    assert word_overlap(item("a list of words", ["of of of of", "a list"], 1)) == 1.0
