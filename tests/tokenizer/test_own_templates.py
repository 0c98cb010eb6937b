"""A user's own chat template: the same promises, or one clear refusal."""

import chat_strategies
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from modicum.store import UserError
from modicum.tokenizer import load_tokenizer, train_tokenizer
from modicum.tokenizer.template import Template

# ChatML as most of the Hub has it: no generation blocks, nothing trimmed
PLAIN_CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# generation blocks without the end of turn, and turns that follow each other with nothing between
BLOCKS = (
    "{{ '<|endoftext|>' }}{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n\\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}"
    "{{ '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n\\n' }}{% endif %}"
)
# headers in plain text: the end of text closes an answer
HEADERS = (
    "{% for m in messages %}{{ '### ' + m.role + ':\\n' + m.content }}"
    "{{ '<|endoftext|>' if m.role == 'assistant' else '\\n\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant:\\n' }}{% endif %}"
)
ROLES = st.sampled_from(["system", "user", "assistant", "tool"])


@pytest.fixture(scope="module", params=[PLAIN_CHATML, BLOCKS, HEADERS], ids=["plain", "blocks", "headers"])
def own(request, folder, tmp_path_factory):
    """A tokenizer with a template of its own, and transformers' reading of the two."""
    tokenizer = load_tokenizer(folder, template=request.param)
    path = tmp_path_factory.mktemp("own")
    tokenizer.save(path)
    return tokenizer, AutoTokenizer.from_pretrained(path)


def dialogues(text):
    """From a user's message on, assistant content as the renderer trims it."""
    message = st.builds(lambda role, content: {"role": role, "content": content}, ROLES, text)
    trimmed = message.map(lambda m: {**m, "content": m["content"].strip()} if m["role"] == "assistant" else m)
    return st.lists(trimmed, max_size=4).map(lambda rest: [{"role": "user", "content": "Hi"}, *rest])


@given(messages=dialogues(chat_strategies.without_names), prompt=st.booleans())
@settings(max_examples=60, deadline=None)
def test_ids_are_those_of_transformers(own, messages, prompt):
    tokenizer, peer = own
    ids = peer.apply_chat_template(messages, add_generation_prompt=prompt)["input_ids"]
    assert tokenizer.render(messages, add_generation_prompt=prompt).ids == ids


@given(messages=dialogues(chat_strategies.with_names))
@settings(max_examples=60, deadline=None)
def test_no_text_becomes_a_control_token_and_none_is_changed(own, messages):
    tokenizer, peer = own
    rendered = tokenizer.render(messages)
    harmless = tokenizer.render([{**m, "content": "x"} for m in messages])
    assert [i for i in rendered.ids if i in tokenizer.special_ids] == [
        i for i in harmless.ids if i in tokenizer.special_ids
    ]
    assert rendered.text == peer.apply_chat_template(messages, tokenize=False) == tokenizer.decode(rendered.ids)


@given(messages=dialogues(chat_strategies.with_names))
@settings(max_examples=60, deadline=None)
def test_the_mask_is_the_answer_and_its_end_of_turn_and_the_prompt_is_a_prefix(own, messages):
    tokenizer, _ = own
    whole = tokenizer.render(messages)
    supervised = [False] * len(whole.ids)
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = tokenizer.render(messages[:place], add_generation_prompt=True).ids
        assert whole.ids[: len(prompt)] == prompt
        end = next(n for n in range(len(prompt), len(whole.ids)) if whole.ids[n] in tokenizer.special_ids)
        assert tokenizer.decode(whole.ids[len(prompt) : end]) == message["content"]
        supervised[len(prompt) : end + 1] = [True] * (end + 1 - len(prompt))
    assert whole.assistant_mask == supervised


def test_content_that_a_template_does_not_trim_is_trimmed_for_it(own):
    tokenizer, _ = own
    user = {"role": "user", "content": "Hi"}
    padded, bare = (tokenizer.render([user, {"role": "assistant", "content": c}]) for c in ("\n\n yes \n", "yes"))
    assert padded == bare


ASK = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        pytest.param(
            "{% for m in messages %}{{ '<|im_start|>' + m.content + '<|im_end|>' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
            "the prompt for message 2 .* is not what that assistant turn begins with",
            id="the header is missing in the example",
        ),
        pytest.param(
            "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% generation %}{{ m.content }}"
            "{% endgeneration %}{{ '<|im_end|>' }}{% endfor %}",
            "the prompt for message 2 .* is not what that assistant turn begins with",
            id="the header is missing in the prompt",
        ),
        pytest.param(
            "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if not loop.last %}{{ '(old) ' }}{% endif %}"
            "{{ m.content + '<|im_end|>' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
            ".* is not what that assistant turn begins with",
            id="earlier turns change when a turn follows",
        ),
        pytest.param(
            "{% for m in messages %}{{ '<|im_start|>' + m.role + ': ' + m.content + '<|im_end|>' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant: ' }}{% endif %}",
            "a token spans the border of an assistant turn",
            id="a space at the border joins the first word",
        ),
    ],
)
def test_a_template_that_would_be_served_otherwise_than_trained_is_refused(folder, template, fault):
    tokenizer = load_tokenizer(folder, template=template)
    with pytest.raises(UserError, match=f"chat.template: {fault}"):
        tokenizer.render(ASK)


@pytest.mark.parametrize("rewriting", ["upper", "urlencode", "e", "tojson(ensure_ascii=True)", "length"])
def test_a_template_may_rewrite_text_that_holds_no_name_and_is_refused_on_text_that_does(folder, rewriting):
    source = "{{ '<|im_start|>' }}{{ messages[0].content | REWRITING }}{{ '<|im_end|>' }}".replace(
        "REWRITING", rewriting
    )
    tokenizer = load_tokenizer(folder, template=source)
    tokenizer.save(folder.parent / "rewriting")
    peer = AutoTokenizer.from_pretrained(folder.parent / "rewriting")
    for content in ("a", "é <", "some text <|im_"):  # a part of a name, what could begin one, and both
        messages = [{"role": "user", "content": content}]
        assert tokenizer.render(messages).ids == peer.apply_chat_template(messages)["input_ids"]
    with pytest.raises(UserError, match="it changes a text that holds the name of a control token"):
        tokenizer.render([{"role": "user", "content": "an <|im_end|> é"}])


def test_a_template_that_makes_a_control_token_of_what_is_no_name_is_refused(folder):
    source = "{% set c = messages[0].content %}{{ '<|' + c + 'end|>' if c | length > 1 else c }}"
    tokenizer = load_tokenizer(folder, template=source)
    assert tokenizer.render([{"role": "user", "content": "leg"}]).text == "<|legend|>"
    with pytest.raises(UserError, match="it changes a text that holds the name of a control token, or part of it"):
        tokenizer.render([{"role": "user", "content": "im_"}])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ '<|' + messages[0].name + '|>' }}", {"name": "im_end", "content": ""}),
        ("{{ messages[0].content + 'end|>' }}", {"content": "<|im_"}),
        ("{{ '<|im_' + messages[0].content }}", {"content": "end|>"}),
        ("{{ messages[0].content + 'end|>' }}", {"content": "text <|im_"}),
        ("{{ '<|im_' + messages[0].content }}", {"content": "end|> text"}),
        ("{{ messages[0].name + messages[0].content }}", {"name": "x<|im_", "content": "end|>y"}),
        ("{{ messages[0].a + messages[0].b + messages[0].content }}", {"a": "<|", "b": "im_end", "content": "|>"}),
        ("{% for k in messages[0].t %}{{ k }}{% endfor %}", {"t": {"<|im_end|>": 1}, "content": ""}),
    ],
)
def test_text_cannot_complete_a_control_token_that_the_template_began(folder, template, message):
    tokenizer = load_tokenizer(folder, template=template)
    rendered = tokenizer.render([{"role": "user", **message}])
    assert "<|im_end|>" in rendered.text
    assert not tokenizer.special_ids.intersection(rendered.ids)
    assert tokenizer.decode(rendered.ids) == rendered.text


def test_a_template_may_write_private_use_characters_itself(folder):
    tokenizer = load_tokenizer(folder, template="\ue000{{ messages[0].content }}\ue001")
    assert tokenizer.render([{"role": "user", "content": "<|im_end|>"}]).text == "\ue000<|im_end|>\ue001"


def test_thousands_of_filling_tokens_do_not_slow_the_renderer_down():
    tokenizer, report = train_tokenizer(["a b"], vocab_size=16_384, min_frequency=2, sample_bytes=1000, seed=0)
    assert report.filler_tokens > 16_000
    html = "<div><|reserved_15999|></div>" * 2000
    rendered = tokenizer.render([{"role": "user", "content": html}])
    assert sum(i in tokenizer.special_ids for i in rendered.ids) == 2
    assert rendered.text == f"<|im_start|>user\n{html}<|im_end|>\n"


def test_without_a_mask_a_long_conversation_is_rendered_no_more_often_than_a_short_one(own, monkeypatch):
    tokenizer, _ = own
    messages = [{"role": role, "content": "Hi <|im_end|>"} for role in (*("user", "assistant") * 20, "user")]
    wanted, times, write = tokenizer.render(messages, add_generation_prompt=True), [], Template.render
    monkeypatch.setattr(Template, "render", lambda *given, **named: times.append(1) or write(*given, **named))
    rendered = tokenizer.render(messages, add_generation_prompt=True, masked=False)
    assert (rendered.ids, rendered.text) == (wanted.ids, wanted.text)
    assert len(times) <= 2
    assert len(rendered.assistant_mask) == len(rendered.ids)
    assert not any(rendered.assistant_mask)
