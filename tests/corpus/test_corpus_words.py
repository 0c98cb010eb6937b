import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modicum.corpus import words as module
from modicum.corpus.words import ngram_hashes, word_hashes, words


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Don't PANIC, it's CVE-2021-44228!", ["don", "t", "panic", "it", "s", "cve", "2021", "44228"]),
        ("Straße über_all", ["straße", "über_all"]),
        ("漢字かな abc", ["漢", "字", "か", "な", "abc"]),
        ("हिन्दी में लिखो", ["हिन्दी", "में", "लिखो"]),
        ("", []),
        (" \n.", []),
    ],
)
def test_words_are_what_a_reader_would_count(text, expected):
    assert words(text) == expected


def test_no_character_changes_how_the_words_beside_it_are_cut():
    alone = [chr(i) for i in range(0x110000) if not 0xD800 <= i < 0xE000]
    pieces = [f"a{character}b" for character in alone]
    together = words(" ".join(pieces))  # with all scripts at once
    one_by_one = [word for piece in pieces for word in words(piece)]
    assert len(together) == len(one_by_one)
    assert [pair for pair in zip(together, one_by_one, strict=True) if pair[0] != pair[1]] == []


@given(st.lists(st.text(st.characters(categories=["L", "N"]), min_size=1), max_size=30), st.integers(1, 8))
def test_equal_ngrams_and_only_they_have_equal_hashes(tokens, n):
    text = " ".join(tokens)
    found = words(text)
    grams = [tuple(found[i : i + n]) for i in range(len(found) - n + 1)]
    hashes = ngram_hashes(word_hashes(text)[0], n).tolist()
    assert len(hashes) == len(grams)
    assert len(set(hashes)) == len(set(grams))
    assert len(set(zip(grams, hashes, strict=True))) == len(set(grams))


def test_the_order_of_words_and_their_number_count():
    forward, backward = word_hashes("a b")[0], word_hashes("b a")[0]
    assert ngram_hashes(forward, 2) != ngram_hashes(backward, 2)
    assert ngram_hashes(word_hashes("a")[0], 1) != word_hashes("a")[0]


def test_a_long_text_is_hashed_in_windows_and_gives_the_same(monkeypatch):
    text = " ".join(f"word{i % 977}" for i in range(5000))
    whole = [array.copy() for array in word_hashes(text)]
    monkeypatch.setattr(module, "_WINDOW", 100)
    word_hashes.cache_clear()
    for array, expected in zip(word_hashes(text), whole, strict=True):
        assert np.array_equal(array, expected)
    word_hashes.cache_clear()


def test_hashes_are_the_same_in_every_process():
    code = "from modicum.corpus.words import *; print(ngram_hashes(word_hashes('the same everywhere')[0], 2).tolist())"
    runs = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(runs) == 1


def test_forgetting_words_changes_no_hash():
    before = word_hashes("some words here")[0].copy()
    module._hash_of.clear()
    word_hashes.cache_clear()
    assert np.array_equal(word_hashes("some words here")[0], before)


def test_the_memory_of_words_is_bounded():
    remembered = module._WordHash((str(i), i) for i in range(200_000))
    assert remembered["new"] == module._hash_of["new"]
    assert len(remembered) == 1
