"""Conversations for the property tests: with and without the names of control tokens in everything a user can write."""

from hypothesis import strategies as st

from modicum.tokenizer import SPECIAL_TOKENS

CHARACTERS = st.characters(exclude_categories=["Cs"])
# pieces of names that join to a whole one when they meet, beside text that looks like the template's own
PIECES = [
    "<|im_",
    "end|>",
    "<",
    ">",
    "|",
    "<|im_start|",
    "im_end",
    "tool_call",
    "\n",
    " ",
    "\t",
    "\u3000",
    "assistant\n",
    "é",
]

plain_text = st.lists(st.text(CHARACTERS, max_size=8) | st.sampled_from(PIECES), max_size=6).map("".join)
without_names = plain_text.filter(lambda text: not any(name in text for name in SPECIAL_TOKENS))
with_names = st.lists(plain_text | st.sampled_from(SPECIAL_TOKENS), max_size=5).map("".join)


def json_values(text):
    scalars = st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.floats(allow_nan=False) | text
    return st.recursive(
        scalars, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(text, inner, max_size=2), max_leaves=4
    )


def tool_calls(text):
    function = st.fixed_dictionaries({"name": text, "arguments": st.dictionaries(text, json_values(text)) | text})
    return st.lists(
        function | st.fixed_dictionaries({"type": st.just("function"), "function": function}), min_size=1, max_size=2
    )


def messages(text):
    said = st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "tool"]), "content": text})
    answered = st.fixed_dictionaries({"role": st.just("assistant"), "content": text})
    called = st.fixed_dictionaries(
        {"role": st.just("assistant"), "tool_calls": tool_calls(text)}, optional={"content": text | st.none()}
    )
    return st.lists(said | answered | called, min_size=1, max_size=5)


def tools(text):
    return st.none() | st.lists(
        st.fixed_dictionaries({"type": st.just("function"), "function": json_values(text)}), min_size=1, max_size=2
    )
