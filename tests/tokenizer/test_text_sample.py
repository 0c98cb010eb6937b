import tracemalloc
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modicum.store import UserError
from modicum.tokenizer.sample import PIECE_CHARACTERS, sample_texts


@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=50)), seed=st.integers(0, 2**32))
def test_what_fits_is_taken_whole(texts, seed):
    sample, report = sample_texts(iter(texts), sample_bytes=10**6, seed=seed)
    size = len("".join(texts).encode())
    assert "".join(sample) == "".join(texts)
    assert (report.documents, report.total_documents) == (len(texts), len(texts))
    assert (report.bytes, report.total_bytes) == (size, size)


@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=50)),
    cap=st.integers(0, 500),
    seed=st.integers(0, 9),
)
def test_the_sample_never_exceeds_its_cap_and_is_the_same_again(texts, cap, seed):
    sample, report = sample_texts(iter(texts), sample_bytes=cap, seed=seed)
    assert sample_texts(texts, sample_bytes=cap, seed=seed) == (sample, report)
    assert report.bytes == sum(len(piece.encode()) for piece in sample) <= cap
    assert report.total_bytes == len("".join(texts).encode())
    assert all(any(piece in text for text in texts) for piece in sample)


def test_every_document_is_as_likely_as_any_other():
    texts = [f"{n:03d} " + "x" * (40 if n % 2 else 400) for n in range(200)]
    samples = [sample_texts(texts, sample_bytes=8000, seed=seed)[0] for seed in range(400)]
    drawn = Counter(int(text[:3]) for sample in samples for text in sample)
    expected = sum(drawn.values()) / 200
    assert 60 < expected < 90  # of 400 draws, about the sampled share of bytes; a count's standard deviation is 8
    assert all(abs(drawn[n] - expected) < 5 * 8 for n in range(200))
    assert abs(sum(drawn[n] for n in range(0, 200, 2)) / sum(drawn[n] for n in range(1, 200, 2)) - 1) < 0.1  # lengths
    assert abs(sum(drawn[n] for n in range(100)) / sum(drawn[n] for n in range(100, 200)) - 1) < 0.05  # places


def test_memory_is_bounded_by_the_cap_and_not_by_the_stream():
    tracemalloc.start()
    sample, report = sample_texts((f"{n} " + "x" * 1000 for n in range(5000)), sample_bytes=50_000, seed=0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert report.total_bytes > 5_000_000
    assert len(sample) > 40
    assert peak < 150_000


def test_a_book_competes_in_pieces_and_pushes_nothing_out():
    book = "word " * 200_000
    sample, report = sample_texts([book, *(["short text"] * 100)], sample_bytes=300_000, seed=3)
    assert max(map(len, sample)) <= PIECE_CHARACTERS
    assert report.total_documents == 101
    assert 20 < report.documents < 60
    assert all(piece.endswith(" ") for piece in sample if piece.startswith("word"))


def test_a_stream_that_is_longer_than_the_cap_by_one_document_still_yields_something():
    sample, report = sample_texts(["x" * 10_000], sample_bytes=1000, seed=0)
    assert 500 < report.bytes <= 1000
    assert report.documents == 1
    assert set("".join(sample)) == {"x"}


def test_a_lone_surrogate_names_its_document():
    with pytest.raises(UserError, match=r"document 2 .* lone surrogate \(U\+DC80\)"):
        sample_texts(["fine", "bad \udc80"], sample_bytes=100, seed=0)
