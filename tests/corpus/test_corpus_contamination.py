import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modicum.corpus.contamination import Contamination

QUESTION = "Which of these protocols encrypts the whole session of a remote shell from the first byte on?"


def wrap(text):
    return f"Some words stand before it. {text} And some stand after."


@pytest.mark.parametrize("n", [5, 8, 13])
def test_a_document_with_a_run_of_n_words_of_an_item_is_found(n):
    words = QUESTION.split()
    index = Contamination.of([QUESTION], n)
    assert index.found_in(wrap(QUESTION))
    assert index.found_in(wrap(" ".join(words[2 : 2 + n])))
    assert not index.found_in(wrap(" ".join(words[2 : 1 + n])))


def test_case_punctuation_line_ends_and_unicode_form_hide_nothing():
    index = Contamination.of(
        ["Qu'est-ce que le chiffre\u0301ment d'un cafe\u0301 tre\u0300s bien garde\u0301 la nuit"], 8
    )
    assert index.found_in("qu est ce que le chiffr\u00e9ment\nD'UN CAF\u00c9, tr\u00e8s bien gard\u00e9 la nuit")


def test_an_item_shorter_than_n_words_counts_whole():
    index = Contamination.of(["What port does the SSH daemon use?"], 13)
    assert index.found_in(wrap("What port does the SSH daemon use?"))
    assert not index.found_in(wrap("What port does the SSH daemon listen on?"))


def test_a_phrase_of_four_words_is_ordinary_language_unless_it_is_the_whole_document():
    index = Contamination.of(["Improper Input Validation"], 13)
    assert not index.found_in(wrap("The weakness is improper input validation, which"))
    assert index.found_in("Improper input validation.")


def test_items_of_many_lengths_are_all_found(tmp_path):
    draw = random.Random(1)
    items = [" ".join(f"v{draw.getrandbits(30)}" for _ in range(length)) for length in range(1, 40)]
    Contamination.of(items, 13).save(tmp_path / "index.npz")
    index = Contamination.load(tmp_path / "index.npz")
    assert [len(item.split()) for item in items if index.found_in(wrap(item))] == list(range(5, 40))
    assert all(index.found_in(item) for item in items)


@given(st.text(), st.integers(0, 20))
def test_without_items_or_words_nothing_is_found(text, n):
    assert not Contamination.of([], n).found_in(text)
    assert not Contamination.of([text], 0).found_in(text)


@given(
    st.lists(st.sampled_from("abcdefg"), max_size=30),
    st.lists(st.sampled_from("abcdefg"), max_size=30),
    st.integers(5, 9),
)
def test_it_agrees_with_comparing_word_by_word(item, document, n):
    length = min(n, len(item))
    runs = {tuple(item[i : i + length]) for i in range(len(item) - length + 1)}
    if length >= 5:
        expected = any(tuple(document[i : i + length]) in runs for i in range(len(document) - length + 1))
    else:
        expected = length > 0 and item == document
    assert Contamination.of([" ".join(item)], n).found_in(" ".join(document)) == expected
