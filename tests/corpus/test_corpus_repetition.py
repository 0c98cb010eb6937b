import gzip
import json
import random
from pathlib import Path

import pytest

from modicum.corpus.repetition import repeats_itself

SMALL = Path(__file__).parents[2] / "data" / "small"


@pytest.fixture
def fresh():
    """fresh(n): n different words."""
    draw = random.Random(0)
    return lambda n: [f"w{draw.getrandbits(40):010x}" for _ in range(n)]


def test_text_of_different_words_stays(fresh):
    assert not repeats_itself(" ".join(fresh(500)))


def test_a_short_text_stays_however_often_it_names_its_subject():
    assert not repeats_itself("A buffer overflow is an overflow of a buffer: the buffer overflow. " * 4)


@pytest.mark.parametrize("share", [0.55, 0.65])
def test_lines_that_come_again_count_by_their_number(fresh, share):
    lines = [" ".join(fresh(8)) for _ in range(100)]
    again = round(100 * share)
    text = "\n".join([*lines[again:], *(["it"] * (again + 1))])  # `again` of 101 lines have come before
    assert repeats_itself(text) == (share > 0.60)


def test_lines_that_come_again_count_by_their_length(fresh):
    lines = [" ".join(fresh(8)) for _ in range(10)]
    long = " ".join(fresh(80))
    assert repeats_itself("\n".join([*lines, long, *fresh(20), long]))
    assert not repeats_itself("\n".join([*lines, long, *fresh(20), " ".join(fresh(80))]))


@pytest.mark.parametrize(("n", "limit"), [(2, 0.40), (3, 0.36), (4, 0.32)])
def test_the_most_frequent_phrase_may_be_so_much_of_the_text(fresh, n, limit):
    for share, dropped in ((limit - 0.04, False), (limit + 0.04, True)):
        words = fresh(600)
        phrase = fresh(n)
        total = sum(map(len, words)) + len(words)
        times = round(share * total / sum(map(len, phrase)))
        step = len(words) // times
        for i in range(times):  # written over words of the same length, so that the length of the text stays
            words[i * step : i * step + n] = phrase
        assert repeats_itself(" ".join(words)) == dropped


def test_a_passage_written_twice_is_dropped_and_a_short_quotation_is_not(fresh):
    words = fresh(400)
    assert repeats_itself(" ".join(words + words[:120]))
    assert not repeats_itself(" ".join(words + words[:40]))


def test_few_of_the_reference_texts_are_taken_for_repetition():
    with gzip.open(SMALL / "corpus.jsonl.gz") as file:
        texts = [json.loads(line)["text"] for line in file]
    assert sum(map(repeats_itself, texts)) < len(texts) * 0.005
