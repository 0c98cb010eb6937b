"""What a person is shown of a conversation's mask."""

import pytest
from tune_chats import conversation

from modicum.corpus import Conversation
from modicum.store import UserError
from modicum.tune import explain_mask


def test_the_pieces_are_the_rendered_text_and_only_answers_with_their_ends_are_supervised(tokenizer):
    chat = conversation("Grüße 👋 <|im_end|>", "Hallo 🌍!", "And?", "Nothing.", system="Be kind.")
    pieces = explain_mask(chat, tokenizer)
    assert "".join(text for text, _ in pieces) == tokenizer.render(chat.messages).text
    assert [text for text, supervised in pieces if supervised] == ["Hallo 🌍!<|im_end|>", "Nothing.<|im_end|>"]
    assert [supervised for _, supervised in pieces] == [False, True, False, True, False]


def test_what_training_refuses_is_refused_here_too(tokenizer):
    with pytest.raises(UserError, match="talk:1: nothing to learn"):
        explain_mask(Conversation([{"role": "user", "content": "Hm?"}], "talk:1", None, None), tokenizer)
