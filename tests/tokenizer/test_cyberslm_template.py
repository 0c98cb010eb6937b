"""The chat format with plain-text headers, on SentencePiece tokenizers: one renderer, for training and for serving."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from modicum.store import UserError
from modicum.tokenizer import CYBERSLM_TEMPLATE, load_tokenizer, sentencepiece_tokenizer
from sentencepiece_models import train

NAMES = ["<s>", "</s>", "<unk>", "<pad>"]
PIECES = ["<s", "/s>", ">", "### User:\n", "\n\n", " ", "\t", "é", "e\u0301", "▁", "\0", "日本"]
CHARACTERS = st.characters(exclude_categories=["Cs"])
plain = st.lists(st.text(CHARACTERS, max_size=8) | st.sampled_from(PIECES), max_size=5).map("".join)
without_names = plain.filter(lambda text: not any(name in text for name in NAMES))
with_names = st.lists(plain | st.sampled_from(NAMES), max_size=5).map("".join)
RULES = {
    "identity": {},
    "nmt_nfkc": {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True},
    "no prefix": {"add_dummy_prefix": False},
}


@pytest.fixture(scope="module", params=RULES)
def pair(request, texts, tmp_path_factory):
    """Our tokenizer with the template, and transformers' reading of the two."""
    folder = tmp_path_factory.mktemp("cyberslm")
    (folder / "tokenizer.model").write_bytes(train(texts, **RULES[request.param]))
    tokenizer = sentencepiece_tokenizer(folder / "tokenizer.model", template=CYBERSLM_TEMPLATE)
    tokenizer.save(folder / "saved")
    return tokenizer, AutoTokenizer.from_pretrained(folder / "saved"), request.param


def dialogues(text):
    message = st.builds(
        lambda role, content: {"role": role, "content": content.strip() if role == "assistant" else content},
        st.sampled_from(["system", "user", "assistant"]),
        text,
    )
    return st.lists(message, min_size=1, max_size=5)


def test_the_format_is_the_one_that_its_users_know(pair):
    tokenizer, _, rule = pair
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is a port?"},
        {"role": "assistant", "content": " A number. "},
        {"role": "user", "content": "And?"},
    ]
    rendered = tokenizer.render(messages, add_generation_prompt=True)
    assert rendered.text == (
        "<s>### System:\nBe brief.\n\n### User:\nWhat is a port?\n\n### Assistant:\nA number.</s>"
        "### User:\nAnd?\n\n### Assistant:\n"
    )
    assert rendered.ids.count(tokenizer.bos_id) == 1
    assert rendered.ids[0] == tokenizer.bos_id
    assert rendered.ids.count(tokenizer.eot_id) == 1
    assert tokenizer.end_of_turn_id == tokenizer.eot_id == 3
    if rule != "nmt_nfkc":
        assert tokenizer.decode(rendered.ids) == rendered.text


@given(messages=dialogues(without_names), prompt=st.booleans())
@settings(max_examples=60, deadline=None)
def test_ids_are_those_of_transformers(pair, messages, prompt):
    tokenizer, peer, _ = pair
    expected = peer.apply_chat_template(messages, add_generation_prompt=prompt)["input_ids"]
    assert tokenizer.render(messages, add_generation_prompt=prompt).ids == expected


@given(messages=dialogues(with_names))
@settings(max_examples=60, deadline=None)
def test_no_text_becomes_a_control_token(pair, messages):
    tokenizer, _, _ = pair
    ids = tokenizer.render(messages).ids
    ends = sum(message["role"] == "assistant" for message in messages)
    assert [i for i in ids if i in tokenizer.special_ids] == [2, *[3] * ends]


@given(messages=dialogues(with_names))
@settings(max_examples=60, deadline=None)
def test_the_prompt_is_a_prefix_and_the_mask_is_the_answer_and_the_end_of_text(pair, messages):
    tokenizer, _, rule = pair
    whole = tokenizer.render(messages)
    supervised = [False] * len(whole.ids)
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = tokenizer.render(messages[:place], add_generation_prompt=True).ids if place else None
        if prompt is None:
            prompt = whole.ids[: whole.assistant_mask.index(True)]
        assert whole.ids[: len(prompt)] == prompt
        end = whole.ids.index(tokenizer.eot_id, len(prompt))
        if rule != "nmt_nfkc":
            assert tokenizer.decode([9, *whole.ids[len(prompt) : end]]) == (
                tokenizer.decode([9]) + message["content"].replace("▁", " ")
            )
        supervised[len(prompt) : end + 1] = [True] * (end + 1 - len(prompt))
    assert whole.assistant_mask == supervised


def test_a_user_can_imitate_a_header_as_the_documentation_says(pair):
    tokenizer, _, _ = pair
    imitated = tokenizer.render([{"role": "user", "content": "a\n\n### System:\nb"}]).ids
    assert imitated == tokenizer.render([{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]).ids


def test_a_role_that_the_format_has_not_is_refused(pair):
    tokenizer, _, _ = pair
    with pytest.raises(UserError, match="this template knows no role tool"):
        tokenizer.render([{"role": "tool", "content": "a"}])


def test_our_own_tokenizer_can_speak_it_too(folder):
    own = load_tokenizer(folder, template=CYBERSLM_TEMPLATE)
    rendered = own.render([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    assert rendered.text == "### User:\na\n\n### Assistant:\nb<|endoftext|>"
    assert rendered.ids[-1] == own.eot_id
