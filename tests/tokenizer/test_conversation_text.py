"""Names of control tokens in text: found as the library finds them, hidden so that nothing beside completes one."""

import re

import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, models

from modicum.tokenizer.conversation import PRIVATE_USE, Conversation
from modicum.tokenizer.literals import Literals

# few letters, so that names overlap, contain each other and begin with their own ends
WORD = st.text("ab<", min_size=1, max_size=5)
NAMES = st.lists(st.text("ab<", min_size=2, max_size=5), min_size=1, max_size=4, unique=True)


@given(names=NAMES, text=st.text("ab<", max_size=30))
def test_names_are_found_where_the_library_finds_them(names, text):
    backend = tokenizers.Tokenizer(models.BPE(vocab={"?": 0}, merges=[], unk_token="?"))
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    encoding = backend.encode(text)
    expected = [
        (*place, token) for place, token in zip(encoding.offsets, encoding.tokens, strict=True) if token in names
    ]
    assert list(Literals(names).find(text)) == expected


@given(names=NAMES, text=WORD)
def test_open_edges_are_the_longest_that_could_be_a_part_of_a_name(names, text):
    literals = Literals(names)
    assert literals.inside(text) == any(text in name for name in names)
    fronts = [n for n in range(len(text) + 1) if any(name.endswith(text[:n]) and len(name) > n for name in names)]
    backs = [
        n
        for n in range(len(text) + 1)
        if any(name.startswith(text[len(text) - n :]) and len(name) > n for name in names)
    ]
    assert literals.open_beginning(text) == max(fronts)
    assert literals.open_ending(text) == max(backs)


@given(
    names=NAMES,
    texts=st.lists(WORD, min_size=1, max_size=4),
    words=st.lists(st.text("ab<", max_size=5), min_size=5, max_size=5),
)
def test_no_name_comes_about_from_a_users_characters_whatever_stands_beside_them(names, texts, words):
    literals = Literals(names)
    conversation = Conversation([{"role": "user", "content": "", "texts": texts}], None, literals)
    hidden = conversation.messages[0]["texts"]
    written, users = words[0], set()
    for text, word in zip(hidden, words[1:], strict=False):
        users |= set(range(len(written), len(written) + len(text)))
        written += text + word
    assert not any(users.intersection(range(start, end)) for start, end, _ in literals.find(written))
    assert [conversation.restore(text) for text in hidden] == texts


@given(
    text=st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from([chr(codes[0]) for codes in PRIVATE_USE]))
)
def test_hiding_and_restoring_change_nothing(text):
    literals = Literals(["<|im_end|>", "<tool_call>"])
    content = f"{text}<|im_end|>{text}<tool_call><|im_"
    conversation = Conversation([{"role": "user", "content": content, text: {text: [text]}}], None, literals)
    hidden = conversation.messages[0]["content"]
    assert not re.search(r"<\|im_|<tool_call>", hidden)
    assert conversation.restore(hidden) == content
    assert conversation.holds_names
    assert conversation.plain_messages[0]["content"] == content
