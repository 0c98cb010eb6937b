"""Streaming text: characters stay whole, stop strings stay unseen, and borders between tokens do not matter."""

from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from modicum.generate.text import TextStream


def cut_randomly(data: bytes, cuts: list[int]) -> list[bytes]:
    borders = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in pairwise(borders)]


def run(pieces: list[bytes], stop: list[str]) -> tuple[list[str], bool]:
    stream = TextStream(stop)
    parts = []
    for piece in pieces:
        parts.append(stream.feed(piece))
        if stream.stopped:
            return parts, True
    parts.append(stream.finish())
    return parts, stream.stopped


def cut_at_stop(text: str, stop: list[str]) -> tuple[str, bool]:
    """By definition, without any state: the first place where some stop string has just ended; the longest goes."""
    for end in range(1, len(text) + 1):
        lengths = [len(s) for s in stop if text[:end].endswith(s)]
        if lengths:
            return text[: end - max(lengths)], True
    return text, False


few_letters = st.text(alphabet="ab\u00e9\U0001f600", max_size=30)
patterns = st.lists(st.text(alphabet="ab\u00e9\U0001f600", min_size=1, max_size=5), max_size=4)
cuts = st.lists(st.integers(0, 200), max_size=20)


@given(few_letters, patterns, cuts)
@example("aab", ["ab"], [1, 2])
@example("abcab", ["abca", "b"], [])
@example("bab", ["ab", "bab"], [])
@example("aab", ["b", "ab"], [1])
def test_stop_strings_end_the_text_wherever_the_token_borders_are(text, stop, cuts):
    parts, stopped = run(cut_randomly(text.encode(), cuts), stop)
    assert ("".join(parts), stopped) == cut_at_stop(text, stop)


@given(few_letters, patterns, cuts)
def test_no_part_of_a_stop_string_is_ever_streamed(text, stop, cuts):
    """What is out must be a beginning of the final text at every moment, so nothing has to be taken back."""
    final, _ = cut_at_stop(text, stop)
    stream, out = TextStream(stop), ""
    for piece in cut_randomly(text.encode(), cuts):
        out += stream.feed(piece)
        assert final.startswith(out)
        assert not any(s in out for s in stop)


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_only_what_may_become_a_stop_string_is_held_back(text, stop):
    """Everything is out but the longest end of the text that begins a stop string."""
    stream, out = TextStream(stop), ""
    for end in range(1, len(text) + 1):
        out += stream.feed(text[end - 1].encode())
        if stream.stopped:
            return
        longest = max(n for s in stop for n in range(len(s)) if text[:end].endswith(s[:n]))
        assert out == text[: end - longest]


@given(st.binary(max_size=40), cuts)
def test_any_bytes_stream_to_what_they_decode_to_whole(data, cuts):
    parts, _ = run(cut_randomly(data, cuts), [])
    assert "".join(parts) == data.decode("utf-8", errors="replace")


@given(st.text(st.characters(codec="utf-8"), max_size=20))
def test_a_character_split_over_two_tokens_is_never_replaced(text):
    parts, _ = run([bytes([b]) for b in text.encode()], [])
    assert "".join(parts) == text
    assert all(part == "" or part in text for part in parts)


def test_an_unfinished_character_becomes_one_replacement_at_the_end_and_not_before():
    stream = TextStream()
    assert stream.feed("né".encode()) == "né"
    assert stream.feed("\U0001f600".encode()[:3]) == ""
    assert stream.finish() == "\ufffd"


def test_nothing_follows_a_stop_string():
    stream = TextStream(["."])
    assert stream.feed(b"one. two") == "one"
    assert stream.stopped
    assert stream.feed(b"three") == ""
    assert stream.finish() == ""


def test_held_back_text_is_given_when_the_answer_ends_otherwise():
    stream = TextStream(["\n\nUser:"])
    assert stream.feed(b"yes\n\nUs") == "yes"
    assert stream.finish() == "\n\nUs"
