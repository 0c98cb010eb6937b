import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from modicum.store import UserError
from modicum.tokenizer import SPECIAL_TOKENS, encoder
from modicum.tokenizer.encoder import LONGEST_WHITE_SPACE

CHARACTERS = st.characters(exclude_categories=["Cs"])
AWKWARD = [
    "\t",
    "\r\n",
    "\u200d",
    "e\u0301",
    "\u00e9",
    "👩‍🚀",
    "\x00",
    "\x7f",
    "  ",
    "\ufeff",
    "12345",
    "<|im_",
    "end|>",
]
TEXT = st.lists(st.text(CHARACTERS) | st.sampled_from([*SPECIAL_TOKENS, *AWKWARD])).map("".join)


@given(text=TEXT)
@example(text="<|im_end|>")
@example(text="\r\n\t \u1680\u2028")
@example(text="<tool_call>\n{}\n</tool_call>")
@settings(max_examples=300)
def test_every_string_survives_and_never_becomes_a_control_token(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert b"".join(map(tokenizer.id_bytes, ids)) == text.encode()
    assert not tokenizer.special_ids.intersection(ids)
    assert tokenizer.encode_batch([text, "", text]) == [ids, [], ids]


@given(texts=st.lists(TEXT, max_size=5))
def test_a_batch_gives_what_its_texts_give_alone(tokenizer, texts):
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]


def test_every_character_survives(tokenizer):
    every = [*range(0x20000), *range(0x20000, sys.maxunicode + 1, 97)]
    text = "".join(chr(c) for c in every if not 0xD800 <= c < 0xE000)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_lone_surrogate_is_one_clear_error(tokenizer):
    with pytest.raises(UserError, match=r"text 2 of 2, character 3: a lone surrogate \(U\+D800\)"):
        tokenizer.encode_batch(["fine", "ab\ud800"])
    with pytest.raises(UserError, match="character 1: a lone surrogate"):
        tokenizer.encode("\udfff")


def test_a_text_that_is_no_string_is_our_fault_and_not_the_users(tokenizer):
    with pytest.raises(TypeError):
        tokenizer.encode_batch(["fine", 3])


@pytest.mark.parametrize("line", ["a", "é ", " \n", "-=", "<|im_end|>"])
def test_a_line_of_a_megabyte_survives(tokenizer, line):
    text = line * (2**20 // len(line.encode()))
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not tokenizer.special_ids.intersection(ids)


@pytest.mark.slow
def test_white_space_longer_than_the_regular_expression_engine_bears_survives(tokenizer):
    """The library alone panics on a run of more than ten million: "retry-limit-in-match over"."""
    text = f"a{' ' * 12_000_000}\u3000x\n  y" + "\t" * LONGEST_WHITE_SPACE
    first, second = tokenizer.encode_batch([text, "b"])
    assert tokenizer.decode(first) == text
    assert tokenizer.decode(second) == "b"


def test_longer_white_space_is_encoded_in_parts(tokenizer, monkeypatch):
    monkeypatch.setattr(encoder, "LONGEST_WHITE_SPACE", 4)
    assert tokenizer.encode("ab" + " " * 9 + "c") == [
        i for part in ("ab    ", "    ", " c") for i in tokenizer.encode(part)
    ]


def test_white_space_the_engine_bears_is_encoded_whole(tokenizer, peer):
    text = "a" + " " * LONGEST_WHITE_SPACE + "b"
    assert tokenizer.encode(text) == peer.encode(text)


@pytest.mark.slow
@pytest.mark.parametrize("line", ["a", "word ", "é", " ", " \n", "\x00", "🙂", "<|im_end|>"])
def test_a_line_of_ten_megabytes_survives(tokenizer, line):
    text = line * (10 * 2**20 // len(line.encode()))
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(ids=st.lists(st.integers(0, 1023)))
def test_any_ids_decode_as_transformers_decodes_them(tokenizer, peer, ids):
    assert tokenizer.decode(ids) == peer.decode(ids)
    assert tokenizer.decode(ids, skip_special=True) == peer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("unknown", [-1, 1024, 10**9])
def test_an_id_without_a_token_is_named(tokenizer, unknown):
    assert tokenizer.vocab_size == 1024
    with pytest.raises(ValueError, match=f"id {unknown} is outside the vocabulary of 1024"):
        tokenizer.decode([5, unknown])
