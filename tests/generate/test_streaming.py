"""A stream is the answer in pieces: whole characters, no stop string, one reason at the end."""

import gc
import weakref

import pytest

from modicum.generate import SamplingParams, passes

GREEDY = SamplingParams(temperature=0, max_new_tokens=30)


@pytest.fixture
def say(speaker, tokenizer):
    """Stream `ids`, said by a model whose prompt is one other token; returns the chunks and the whole answer."""

    def run(ids, **settings):
        first = next(i for i in range(24, tokenizer.vocab_size) if i not in ids)
        generator = speaker([first, *ids, tokenizer.end_of_turn_id])
        params = SamplingParams(**({"temperature": 0, "max_new_tokens": 30} | settings))
        chunks = list(generator.stream([first], params))
        return chunks, generator.generate([[first]], params)[0]

    return run


def single_bytes(tokenizer, data):
    """Ids of tokens that are one byte each."""
    table = {tokenizer.id_bytes(i): i for i in range(24, tokenizer.vocab_size)}
    return [table[bytes([b])] for b in data]


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=4, max_new_tokens=50, stop=("e", " th"))])
def test_the_pieces_of_a_stream_are_the_answer(generator, prompts, params):
    for prompt in prompts:
        whole, chunks = generator.generate([prompt], params)[0], list(generator.stream(prompt, params))
        assert "".join(chunk.text for chunk in chunks) == whole.text
        assert [i for chunk in chunks for i in chunk.ids] == whole.ids
        assert [x for chunk in chunks for x in chunk.logprobs] == whole.logprobs


def test_exactly_the_last_chunk_has_a_finish_reason_and_only_it_may_be_empty(generator, prompts):
    for prompt in prompts:
        *before, last = generator.stream(prompt, GREEDY)
        assert last.finish_reason in ("stop", "length")
        assert all(chunk.finish_reason is None and chunk.text for chunk in before)


def test_a_character_split_over_tokens_is_streamed_whole(say, tokenizer):
    ids = single_bytes(tokenizer, "\U0001f600é!".encode())
    assert len(ids) == 7
    chunks, whole = say(ids)
    assert [chunk.text for chunk in chunks] == ["\U0001f600", "é", "!", ""]
    assert [len(chunk.ids) for chunk in chunks] == [4, 2, 1, 1]
    assert whole.text == "\U0001f600é!"


def test_an_unfinished_character_at_the_end_is_one_replacement_character(say, tokenizer):
    ids = single_bytes(tokenizer, "a\U0001f600".encode())
    chunks, whole = say(ids, max_new_tokens=4)
    assert [chunk.text for chunk in chunks] == ["a", "\ufffd"]
    assert (whole.text, whole.finish_reason) == ("a\ufffd", "length")


def test_a_stop_string_across_token_borders_ends_the_answer_and_is_never_emitted(say, tokenizer):
    ids = single_bytes(tokenizer, b"one\n#Us")
    chunks, whole = say(ids, stop=["\n#U"])
    assert [chunk.text for chunk in chunks] == ["o", "n", "e", ""]
    assert (whole.text, whole.finish_reason, whole.ids) == ("one", "stop", ids[:6])


def test_a_stop_string_inside_a_token_cuts_the_token(say, tokenizer):
    word = next(i for i in range(24, tokenizer.vocab_size) if tokenizer.id_bytes(i) == b" the")
    chunks, whole = say([*single_bytes(tokenizer, b"so"), word], stop=["he"])
    assert whole.text == "so t"
    assert "".join(chunk.text for chunk in chunks) == "so t"
    assert (chunks[-1].finish_reason, chunks[-1].ids) == ("stop", [word])


def test_what_only_looked_like_a_stop_string_is_given_in_the_end(say, tokenizer):
    ids = single_bytes(tokenizer, b"one\n#")
    chunks, whole = say(ids, stop=["\n#User"])
    assert [chunk.text for chunk in chunks] == ["o", "n", "e", "\n#"]
    assert (whole.text, whole.finish_reason) == ("one\n#", "stop")


def test_a_stop_string_finished_by_the_last_allowed_token_is_a_stop(say, tokenizer):
    ids = single_bytes(tokenizer, b"ab!")
    assert say(ids, stop=["!"], max_new_tokens=3)[1].finish_reason == "stop"
    assert say(ids, stop=["?"], max_new_tokens=3)[1].finish_reason == "length"


def test_stop_ids_of_the_generator_and_of_the_request_both_end_it(say, tokenizer):
    ids = single_bytes(tokenizer, b"abc")
    assert say(ids)[1].ids == [*ids, tokenizer.end_of_turn_id]
    chunks, whole = say(ids, stop_ids=[ids[1]])
    assert (whole.text, whole.ids, whole.finish_reason) == ("a", ids[:2], "stop")
    assert [(chunk.text, chunk.ids, chunk.finish_reason) for chunk in chunks] == [
        ("a", ids[:1], None),
        ("", ids[1:2], "stop"),
    ]


def test_a_closed_stream_frees_its_cache(generator, prompts, monkeypatch):
    made = []
    cache = passes.SlotCache

    def spy(*args, **settings):
        made.append(weakref.ref(new := cache(*args, **settings)))
        return new

    monkeypatch.setattr(passes, "SlotCache", spy)
    stream = generator.stream(prompts[1], GREEDY)
    next(stream)
    assert made[0]() is not None
    stream.close()
    gc.collect()
    assert [ref() for ref in made] == [None]
