"""What is refused is refused in OpenAI's shape, with the right status and the field's name, and costs no slot."""

import copy
import json

import openai
import pytest
import torch
from pydantic import ValidationError

from modicum.generate import Engine, Generator
from modicum.serve import Limits, Served
from modicum.serve.errors import bad_request
from modicum.serve.requests import ChatRequest, CompletionRequest

ASK = {"model": "nano", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def schema(value):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": value}}}


def lark(text):
    return {"response_format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": text}}}


def tool(parameters):
    return {"type": "function", "function": {"name": "g", "parameters": parameters}}


def deep(levels):
    value = {"type": "integer"}
    for _ in range(levels):
        value = {"type": "array", "items": value}
    return value


@pytest.fixture
def refused(server):
    """The error object of a request that must be refused."""

    def refused(asked, status=400, path="/v1/chat/completions", **options):
        sent = {"content": asked} if isinstance(asked, bytes) else {"json": asked}
        with server.http() as http:
            response = http.post(path, **sent, **options)
        assert response.status_code == status, response.text
        assert response.headers["content-type"] == "application/json"
        error = response.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["message"]
        return error

    return refused


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"logit_bias": {"5": float("nan")}}, "logit_bias.5"),
        ({"top_p": 1.5}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"presence_penalty": 9}, "presence_penalty"),
        ({"frequency_penalty": "much"}, "frequency_penalty"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_completion_tokens": 1.5}, "max_completion_tokens"),
        ({"n": 0}, "n"),
        ({"n": 9}, "n"),
        ({"seed": 1 << 70}, "seed"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": "x" * 1001}, "stop"),
        ({"logit_bias": {"many": 1}}, "logit_bias"),
        ({"logit_bias": {"100000": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"logit_bias": {str(number): 1 for number in range(1025)}}, "logit_bias"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "king", "content": "hi"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, None),
        ({"messages": [{"role": "user", "content": "x" * 100_000}]}, "messages"),
        ({"messages": [{"role": "user", "content": "a b " * 900}]}, "messages"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, None),
        ({"response_format": {"type": "poem"}}, "response_format"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.json_object.schema"),
        ({"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "response_format.text.json_schema"),
        ({"response_format": {"type": "\ud800"}}, "response_format"),
        (schema({"type": "string", "not": {"const": "a"}}), "response_format"),
        (schema({"type": "strin"}), "response_format"),
        (schema({"$ref": "http://example.org/schema"}), "response_format"),
        (schema({"const": "\ud800"}), "response_format"),
        (schema(deep(60)), "response_format"),
        (schema({"enum": ["x" * 70_000]}), "response_format"),
        (schema({"type": "integer", "x-guidance": {"lenient": True}}), "response_format"),
        (schema({"type": "object", "requird": ["a"]}), "response_format"),
        (schema({"maxLenght": 1}) | {"tools": [TOOL]}, "response_format"),
        (lark('start: %json {"maxLenght": 1}'), "response_format"),
        ({"tools": [TOOL, tool({"requird": []})]}, "tools.1.function.parameters"),
        ({"response_format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": "(?=a)"}}}, None),
        (lark("start: end"), None),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": deep(60)}}]}, None),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"const": "\ud800"}}}]}, None),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]}, None),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [TOOL] * 65}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)  # fmt: skip
def test_a_bad_field_is_named(refused, server, change, param):
    before = server.engine.numbers().requests
    # written here, since a client's own encoder refuses what is no Unicode
    error = refused(json.dumps(ASK | change).encode(), headers={"Content-Type": "application/json"})
    assert error["type"] == "invalid_request_error"
    if param is not None:
        assert error["param"] == param
        assert param.split(".")[0] in error["message"]
    assert server.engine.numbers().requests == before


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{"name": "f", "parameters": {"type": "object"}}]),
        ("function_call", {"name": "f"}),
        ("guided_json", {"type": "integer"}),
        ("guided_json", '{"type": "integer"}'),
        ("guided_choice", ["yes", "no"]),
        ("guided_regex", "[0-9]+"),
        ("guided_grammar", 'root ::= "yes"'),
        ("structured_outputs", {"choice": ["yes", "no"]}),
        ("json_schema", {"type": "integer"}),
        ("regex", "[0-9]+"),
        ("grammar", 'root ::= "yes"'),
        ("ebnf", 'root ::= "yes"'),
    ],
)
def test_a_form_that_is_asked_for_in_other_servers_words_is_never_ignored(refused, path, field, value):
    asked = ASK if "chat" in path else {"model": "nano", "prompt": "hi"}
    error = refused(asked | {field: value}, path=path)
    assert error["param"] == field
    assert error["message"].startswith(f"{field}: not understood here; use ")


def test_such_a_field_that_is_null_asks_for_nothing(server):
    with server.http() as http:
        assert http.post("/v1/chat/completions", json=ASK | {"functions": None, "grammar": None}).status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("body", [b"{", b"[]", b'"hi"', b"\xff", b"[" * 100_000, b'{"model": NaN}'])
def test_a_body_that_is_no_request_is_the_clients_fault(refused, path, body):
    refused(body, 400, path, headers={"Content-Type": "application/json"})


def test_a_body_of_another_content_type_is_not_read(server):
    """A page of another site can send such a body without asking first."""
    with server.http() as http:
        response = http.post("/v1/chat/completions", content=json.dumps(ASK), headers={"Content-Type": "text/plain"})
    assert response.status_code == 415


def test_a_completion_refuses_what_it_does_not_do(refused):
    for change in (
        {"tools": [TOOL]},
        {"tool_choice": "required"},
        {"suffix": "x"},
        {"best_of": 3},
        {"echo": True, "logprobs": 1},
        {"prompt": []},
        {"n": 5},
    ):
        refused({"model": "nano", "prompt": ["a", "b"]} | change, path="/v1/completions")
    refused({"model": "nano", "prompt": [99_999]}, path="/v1/completions")
    refused({"model": "nano", "prompt": [5] * 1024}, path="/v1/completions")


@pytest.mark.parametrize("name", ["gpt-4", "../nano", "nano\ud800", ""])
def test_only_the_listed_model_is_served(refused, name):
    body = json.dumps(ASK | {"model": name}).encode()
    error = refused(body, 404, headers={"Content-Type": "application/json"})
    assert (error["param"], error["code"]) == ("model", "model_not_found")


def test_an_unknown_path_or_method_has_an_error_object(server):
    with server.http() as http:
        for method, path, status in (("GET", "/v1/embeddings", 404), ("GET", "/v1/chat/completions", 405)):
            response = http.request(method, path)
            assert (response.status_code, list(response.json())) == (status, ["error"])


def test_the_official_client_tells_them_apart(client):
    ask = client.chat.completions.create
    with pytest.raises(openai.BadRequestError, match="temperature"):
        ask(**ASK | {"temperature": -1})
    with pytest.raises(openai.NotFoundError, match="not served"):
        ask(**ASK | {"model": "other"})
    with pytest.raises(openai.BadRequestError) as error:
        ask(**ASK | {"messages": [{"role": "user", "content": "a " * 3000}]})
    assert error.value.code == "context_length_exceeded"


def test_an_error_inside_a_stream_is_an_event_and_the_streams_end(start):
    """A grammar can become too much in the middle of an answer; here the engine is closed."""
    with start(slots=1) as server, server.client() as client:
        stream = client.chat.completions.create(
            **ASK | {"stream": True, "max_tokens": 900, "logit_bias": {"0": -100, "3": -100}}
        )
        next(iter(stream))
        server.engine.close()
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)


def test_a_message_that_is_no_unicode_can_still_be_told():
    assert json.loads(bad_request("no \ud800").response().body)["error"]["message"] == "no \ud800"


def test_many_prompts_are_refused_before_any_of_them_is_read(refused, monkeypatch):
    monkeypatch.setattr("modicum.serve.completions.completion_prompts", None)
    asked = {"model": "nano", "prompt": ["a"] * 10_000, "max_tokens": 1}
    assert "prompts times n is 10000" in refused(asked, path="/v1/completions")["message"]


def test_the_echo_of_ids_without_a_text_is_refused(refused, generator):
    tokens, rows = generator.tokenizer.vocab_size, generator.model.config.vocab_size
    asked = {"model": "nano", "prompt": [rows - 1], "echo": True, "max_tokens": 200}
    assert rows > tokens, "the model has rows that no token has"
    assert "echo needs ids that have a text" in refused(asked, path="/v1/completions")["message"]


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (ChatRequest, {"messages": 1000 * [1]}),
        (ChatRequest, {"messages": [{"role": "user", "content": 1000 * [1]}]}),
        (ChatRequest, {"messages": [{"role": "assistant", "tool_calls": 1000 * [1]}]}),
        (ChatRequest, {"tools": 1000 * [1]}),
        (ChatRequest, {"stop": 1000 * [1]}),
        (ChatRequest, {"logit_bias": dict.fromkeys(map(str, range(2000)), "x")}),
        (CompletionRequest, {"prompt": 1000 * [None]}),
        (CompletionRequest, {"prompt": 1000 * [1000 * [-1]]}),
        (CompletionRequest, {"prompt": [*1000 * [1], *1000 * ["x"]]}),
    ],
)
def test_a_long_list_of_faults_makes_few_errors(kind, change):
    """An error costs a thousand times the memory of the item that makes it."""
    asked = (ASK if kind is ChatRequest else {"model": "nano"}) | change
    with pytest.raises(ValidationError) as error:
        kind.model_validate(asked)
    assert error.value.error_count() <= 4


def test_a_damaged_model_is_no_fault_of_its_client(generator, start, caplog):
    model = copy.deepcopy(generator.model)
    model.model.norm.weight.data.fill_(torch.nan)
    damaged = Generator(model, generator.tokenizer, stop_ids=generator.stop_ids)

    def load():
        return Served("nano", damaged, Engine(damaged, slots=1, compiled=False), Limits())

    with start(load=load) as server, server.http() as http:
        whole = http.post("/v1/chat/completions", json=ASK)
        events = http.post("/v1/chat/completions", json=ASK | {"stream": True}).text.split("\n\n")
    assert whole.status_code == 500
    for error in (whole.json()["error"], json.loads(events[-3].removeprefix("data: "))["error"]):
        assert (error["type"], error["code"]) == ("server_error", "model_fault")
        assert "not finite" in error["message"]
    assert caplog.text.count("a request failed: the model's logits are not finite") == 2
