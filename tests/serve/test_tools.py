"""Tools: shown by the template, called with arguments that their schemas allow, and taken apart as they come."""

import asyncio
import json

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from talking import WAYS, ask

from modicum.generate import Generator
from modicum.serve import Limits
from modicum.serve.constrain import Grammars, lark_grammar
from modicum.serve.prompts import chat_prompt
from modicum.serve.requests import ChatRequest
from modicum.serve.tools import Arguments, Call, CallReader, Done, Text, call_grammar, writes_tools
from modicum.tokenizer import CYBERSLM_TEMPLATE, Tokenizer

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
SCHEMAS = {"weather": WEATHER, "now": {"type": "object", "properties": {}, "additionalProperties": False}}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
ASK = {"messages": [{"role": "user", "content": "Rain?"}], "tools": TOOLS, "max_tokens": 300, "seed": 2}


def valid(calls):
    for call in calls:
        jsonschema.validate(json.loads(call["arguments"]), SCHEMAS[call["name"]])
    return [call["name"] for call in calls]


@pytest.mark.parametrize("way", WAYS)
def test_a_required_call_has_arguments_that_its_schema_allows(server, way):
    result = ask(server.address, way, ASK | {"tool_choice": "required", "parallel_tool_calls": False})
    assert len(valid(result.calls[0])) == 1
    assert result.calls[0][0]["id"].startswith("call_")
    assert result.finish_reasons == {0: "tool_calls"}
    assert result.texts == {0: ""}


@pytest.mark.parametrize("way", WAYS)
def test_a_named_tool_is_the_one_that_is_called(server, way):
    for name in SCHEMAS:
        choice = {"type": "function", "function": {"name": name}}
        assert valid(ask(server.address, way, ASK | {"tool_choice": choice}).calls[0]) == [name]


@pytest.mark.parametrize("way", WAYS)
def test_text_may_stand_before_calls(server, generator, way):
    """A model that likes to call."""
    opens = generator.tokenizer.encode_with_control("<tool_call>")
    asked = ASK | {"logit_bias": {str(opens[0]): 2.5}, "n": 6, "max_tokens": 120}
    result = ask(server.address, way, asked)
    called = [i for i in result.calls if result.finish_reasons[i] == "tool_calls"]
    assert called
    assert any(result.texts[i] for i in called)
    for i in called:
        valid(result.calls[i])
    assert "tool_call" not in "".join(result.texts.values())


def test_plain_text_cannot_say_the_name_of_the_marker(generator):
    """Else what a message made the model repeat would be read as a call that no schema has seen."""
    tokenizer, limits = generator.tokenizer, Limits()
    grammars = Grammars(tokenizer, generator.model.config.vocab_size, generator.stop_ids, limits)
    request = ChatRequest(model="nano", **ASK)
    grammar = lark_grammar(call_grammar(request, request.tools, None, limits), limits, param="tools")
    (mask,) = asyncio.run(grammars.masks(grammar, 1, param="tools"))
    for token in tokenizer.encode("Say <tool_call"):
        assert mask.allowed()[token]
        mask.take(token)
    (closes,) = tokenizer.encode(">")
    assert not mask.allowed()[closes]
    assert mask.allowed()[tokenizer.encode(" ")[0]]


def test_thoughts_that_are_text_of_an_answer_may_stand_before_a_call(generator):
    """Qwen3 does not flag `<think>` as special, so it is part of what is said."""
    text = json.dumps(generator.tokenizer.definition)
    definition = json.loads(text.replace("<|reserved_0|>", "<think>").replace("<|reserved_1|>", "</think>"))
    for entry in definition["added_tokens"]:
        entry["special"] = "think" not in entry["content"]
    tokenizer, limits = Tokenizer(definition, generator.tokenizer.chat_template), Limits()
    said = tokenizer.encode_with_control("<think>\nso\n</think>\n\n<tool_call>")
    assert len(tokenizer.spoken_ids.intersection(said)) == 3
    request = ChatRequest(model="nano", **ASK)
    grammar = lark_grammar(call_grammar(request, request.tools, None, limits), limits, param="tools")
    grammars = Grammars(tokenizer, generator.model.config.vocab_size, generator.stop_ids, limits)
    (mask,) = asyncio.run(grammars.masks(grammar, 1, param="tools"))
    for token in said:
        assert mask.allowed()[token], tokenizer.decode([token])
        mask.take(token)
    assert not mask.allowed()[said[0]], "a call is nothing but its name and arguments"


def test_a_schema_for_the_answer_and_tools_go_together(server):
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    result = ask(server.address, "sync", ASK | {"response_format": wanted, "n": 6, "max_tokens": 100})
    for i, reason in result.finish_reasons.items():
        if reason == "stop":
            jsonschema.validate(json.loads(result.texts[i]), schema)
        elif reason == "tool_calls":
            valid(result.calls[i])
    assert "stop" in result.finish_reasons.values()


def test_tool_choice_none_shows_no_tools(server):
    plain = {key: value for key, value in ASK.items() if key != "tools"}
    without = ask(server.address, "sync", plain | {"max_tokens": 8})
    assert ask(server.address, "sync", ASK | {"tool_choice": "none", "max_tokens": 8}).texts == without.texts


def test_a_call_and_its_result_are_part_of_the_next_prompt(server, generator):
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm", "days": 1}'}}
    ]
    messages = [
        *ASK["messages"],
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "dry"},
    ]
    ids = generator.tokenizer.render(
        [messages[0], {"role": "assistant", "content": "", "tool_calls": calls}, {"role": "tool", "content": "dry"}],
        add_generation_prompt=True,
        tools=TOOLS,
    ).ids
    assert b'"arguments": {"city": "Ulm", "days": 1}' in b"".join(map(generator.tokenizer.id_bytes, ids))
    result = ask(server.address, "sync", ASK | {"messages": messages, "max_tokens": 3})
    assert result.usage.prompt_tokens == len(ids)


def test_a_template_without_words_for_tools_is_recognised(tokenizer):
    assert writes_tools(tokenizer)
    assert not writes_tools(Tokenizer(tokenizer.definition, CYBERSLM_TEMPLATE))
    assert not writes_tools(Tokenizer(tokenizer.definition, None))


CALLS = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}{% for c in m.tool_calls or [] %}"
CALLS += "{{ '\n<tool_call>\n' + '{\"name\": \"' + c.function.name + '\", \"arguments\": ' }}WRITTEN"
CALLS += "{{ '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
CALLS += "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
# what is opened for an answer is no part of past ones
CALLS += "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"


@pytest.mark.parametrize(
    ("written", "found", "read"),
    [
        ("{{ c.function.arguments | tojson }}", '{"city": "Ulm", "days": 1}', True),  # as Qwen2.5's
        ("{{ c.function.arguments }}", '{"city":"Ulm", "days": 1}', True),
        ("{% for k, v in c.function.arguments | items %}{{ k }}={{ v }};{% endfor %}", "city=Ulm;days=1;", False),
    ],
)
def test_arguments_come_to_a_template_as_it_writes_them(tokenizer, generator, written, found, read):
    own = Tokenizer(tokenizer.definition, CALLS.replace("WRITTEN", written))
    assert writes_tools(own) == read
    call = {"id": "c1", "function": {"name": "weather", "arguments": '{"city":"Ulm", "days": 1}'}}
    messages = [*ASK["messages"], {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "dry"}]
    request = ChatRequest(model="nano", messages=messages)
    prompt = chat_prompt(Generator(generator.model, own, stop_ids=generator.stop_ids), request.messages, [])
    assert f'{{"name": "weather", "arguments": {found}}}\n</tool_call>' in own.decode(prompt.ids)


def whole(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


SAID = st.text("<tool_cal>/\n ab", max_size=20).filter(lambda text: "<tool_call>" not in text and text[-1:] != "\n")
ARGUMENTS = st.dictionaries(
    st.text(max_size=4), st.sampled_from(["}\n</tool_call>", "<tool_call>", 1, None]), max_size=3
)


@given(SAID, st.lists(st.tuples(st.sampled_from(["f", "get-it_2"]), ARGUMENTS), max_size=3), st.data())
def test_an_answer_is_taken_apart_alike_wherever_it_is_cut(said, calls, data):
    written = [(name, json.dumps(arguments)) for name, arguments in calls]
    text = "\n".join([said, *(whole(*call) for call in written)] if said else [whole(*call) for call in written])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    reader, events = CallReader(), []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        events += reader.feed(text[start:end])
    events += reader.finish()
    assert "".join(event.text for event in events if isinstance(event, Text)) == said
    found = []
    for event in events:
        if isinstance(event, Call):
            found.append((event.name, ""))
        elif isinstance(event, Arguments):
            found[-1] = (found[-1][0], found[-1][1] + event.text)
    assert found == written
    assert sum(isinstance(event, Done) for event in events) == len(written)


@given(st.recursive(st.none() | st.text(max_size=8) | st.just("see <tool_call> here"), st.lists), st.data())
def test_json_that_holds_a_markers_letters_is_whole(value, data):
    text = " " + json.dumps(value)
    cut = data.draw(st.integers(0, len(text)))
    reader = CallReader(json_or_calls=True)
    events = [*reader.feed(text[:cut]), *reader.feed(text[cut:]), *reader.finish()]
    assert all(isinstance(event, Text) for event in events)
    assert "".join(event.text for event in events) == text


def test_where_json_could_stand_calls_are_still_calls():
    reader = CallReader(json_or_calls=True)
    events = [event for letter in whole("f", "{}") for event in reader.feed(letter)]
    assert [type(event) for event in events if not isinstance(event, Arguments)] == [Call, Done]
