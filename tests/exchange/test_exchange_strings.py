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


def test_a_normalizer_that_was_lost_gives_other_ids(composing, tmp_path):
    composing.save(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps({**content, "normalizer": None}))
    with pytest.raises(UserError, match=r"out: tokenizer\.json gives other ids to \d+ of 500 texts"):
        check_tokenizer(tmp_path, "out", composing, agreed_strings(composing, 500))
