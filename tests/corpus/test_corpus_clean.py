import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modicum.corpus.clean import clean


@given(st.text())
def test_cleaning_twice_changes_nothing_more(text):
    assert clean(clean(text)) == clean(text)


@given(st.text())
def test_clean_text_is_nfc_and_has_no_control_character_but_tab_and_newline(text):
    cleaned = clean(text)
    assert unicodedata.is_normalized("NFC", cleaned)
    assert all(unicodedata.category(c) != "Cc" or c in "\t\n" for c in cleaned)


@given(st.text(st.characters(categories=["L", "N", "P", "S", "Z", "Mn", "Cf"])))
def test_text_without_controls_is_only_normalized(text):
    assert clean(text) == unicodedata.normalize("NFC", text.lstrip("\ufeff"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\r\nb\rc\n", "a\nb\nc\n"),
        ("a\x00b\x1b[0m\x7f\x84c\td", "ab[0mc\td"),
        ("page\x0cnext\x0brow\x85end\r\n", "page\nnext\nrow\nend\n"),
        ("e\u0301", "\u00e9"),
        ("\ufeffa\ufeffb", "a\ufeffb"),
        ("\x00\ufeffa", "a"),
        ("👩\u200d💻 zero\u200bwidth", "👩\u200d💻 zero\u200bwidth"),
        ("e\x00\u0301", "\u00e9"),
    ],
)
def test_known_texts(text, expected):
    assert clean(text) == expected
