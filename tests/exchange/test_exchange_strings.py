"""Two tokenizers are held against each other on strings that would show a difference."""

import json

import pytest

from modicum.exchange.strings import agreed_strings, check_tokenizer
from modicum.store import UserError
from modicum.tokenizer import Tokenizer


@pytest.fixture
def composing(tokenizer):
    return Tokenizer({**tokenizer.definition, "normalizer": {"type": "NFC"}}, tokenizer.chat_template, tokenizer.roles)


def test_a_tokenizer_as_it_was_saved_is_the_same(composing, tmp_path):
    composing.save(tmp_path)
    check_tokenizer(tmp_path, "out", composing, agreed_strings(composing, 2000))


def test_a_marker_that_is_not_flagged_special_is_no_fault_of_the_file(tokenizer, tmp_path):
    """As `<tool_call>` in Qwen's files: text here, a token of any text in the library that wrote them."""
    added = [{**one, "special": one["content"] != "<tool_call>"} for one in tokenizer.definition["added_tokens"]]
    unflagged = Tokenizer({**tokenizer.definition, "added_tokens": added}, tokenizer.chat_template, tokenizer.roles)
    unflagged.save(tmp_path)
    strings = agreed_strings(unflagged, 2000)
    assert any("<tool_call>" in string for string in strings)
    check_tokenizer(tmp_path, "out", unflagged, strings)


def test_a_normalizer_that_was_lost_gives_other_ids(composing, tmp_path):
    composing.save(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps({**content, "normalizer": None}))
    with pytest.raises(UserError, match=r"out: tokenizer\.json gives other ids to \d+ of 500 texts"):
        check_tokenizer(tmp_path, "out", composing, agreed_strings(composing, 500))
