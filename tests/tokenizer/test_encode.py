import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from modicum.store import UserError
from modicum.tokenizer import SPECIAL_TOKENS

VALID = st.characters(exclude_categories=["Cs"])
TEXT = st.lists(
    st.text(VALID)
    | st.sampled_from(SPECIAL_TOKENS)
    | st.sampled_from(["\t", "\r\n", "\u200d", "e\u0301", "\u00e9", "👩‍🚀", "\x00", "\x7f", "  ", "\ufeff", "12345"])
).map("".join)


@given(text=TEXT)
@example(text="<|im_end|>")
@example(text="\r\n\t \u1680\u2028")
@settings(max_examples=300)
def test_every_string_survives_and_never_becomes_a_control_token(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not tokenizer.special_ids.intersection(ids)
    assert tokenizer.encode_batch([text, text]) == [ids, ids]


def test_a_lone_surrogate_is_one_clear_error(tokenizer):
    with pytest.raises(UserError, match=r"text 2 of 2, character 3: a lone surrogate \(U\+D800\)"):
        tokenizer.encode_batch(["fine", "ab\ud800"])
    with pytest.raises(UserError, match="character 1: a lone surrogate"):
        tokenizer.encode("\udfff")
