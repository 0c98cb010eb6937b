"""A schema, a regular expression or a grammar holds the whole answer, whatever the model would say."""

import asyncio
import json
import random
import re
import threading
import time
from itertools import product

import jsonschema
import llguidance
import pytest
from talking import ask

from modicum.serve import Limits, chat, completions, grammar_child
from modicum.serve.constrain import GrammarMask, Grammars, json_grammar, regex_grammar
from modicum.serve.errors import ApiError

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "β", "😀"]}, "maxItems": 3},
        "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/address"}]},
    },
    "$defs": {
        "address": {
            "type": "object",
            "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["zip"],
            "additionalProperties": False,
        }
    },
    "required": ["name", "age", "tags", "next"],
    "additionalProperties": False,
}


def request(**fields):
    return {"messages": [{"role": "user", "content": "go"}], "max_tokens": 700, **fields}


def by_schema(schema):
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}}


@pytest.mark.parametrize("way", ["sync", "sync stream"])
def test_answers_follow_the_schema_at_any_temperature(server, way):
    for temperature, seed in ((0, 0), (1, 1), (1, 2), (2, 3)):
        asked = request(response_format=by_schema(PERSON), temperature=temperature, seed=seed)
        result = ask(server.address, way, asked)
        assert result.finish_reasons == {0: "stop"}
        jsonschema.validate(json.loads(result.texts[0]), PERSON)


def test_the_mask_is_stronger_than_any_bias(server, generator):
    """More rows in the model's embedding than tokens, and every bias against the grammar."""
    letters = [i for i in range(24, generator.tokenizer.vocab_size) if generator.tokenizer.id_bytes(i).isalpha()]
    asked = request(response_format=by_schema({"type": "integer", "minimum": 10, "maximum": 99}), n=4, seed=1)
    result = ask(server.address, "sync", asked | {"logit_bias": {str(i): 100 for i in letters}})
    assert all(re.fullmatch("[1-9][0-9]", text) for text in result.texts.values())
    assert set(result.finish_reasons.values()) == {"stop"}


@pytest.mark.parametrize(
    ("syntax", "definition", "pattern"),
    [
        ("regex", r"CVE-20[12][0-9]-[0-9]{4,7}", r"CVE-20[12][0-9]-[0-9]{4,7}"),
        ("lark", 'start: "yes" | "no" "!"+ END\nEND: "."', r"yes|no!+\."),
    ],
)
def test_a_regular_expression_or_a_grammar_holds_the_answer(server, syntax, definition, pattern):
    wanted = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    for kind, where in (("chat", {}), ("text", {"prompt": "go"})):
        asked = {
            k: v
            for k, v in request(seed=3, extra_body={"response_format": wanted}).items()
            if kind == "chat" or k != "messages"
        }
        result = ask(server.address, "sync", asked | where, kind=kind)
        assert re.fullmatch(pattern, result.texts[0])
        assert result.finish_reasons == {0: "stop"}


def test_white_space_between_parts_is_bounded(server, generator):
    """A small model that says nothing but spaces still comes to the end."""
    spaces = {str(i): 100 for i in range(24, 512) if generator.tokenizer.id_bytes(i).isspace()}
    schema = {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"], "additionalProperties": False}
    asked = request(response_format=by_schema(schema), logit_bias=spaces, max_tokens=300, seed=1)
    result = ask(server.address, "sync", asked)
    assert json.loads(result.texts[0]) == {"a": None}


@pytest.fixture
def masks(generator):
    """A function that compiles grammars, one after the other, each for so many masks; and the Grammars it used."""

    def masks(schemas, count=1, **limits):
        limits = Limits(**limits)
        made = Grammars(generator.tokenizer, generator.model.config.vocab_size, generator.stop_ids, limits)

        async def compile_all():
            return [await made.masks(json_grammar(s, limits, param="p"), count, param="p") for s in schemas]

        return asyncio.run(compile_all()), made

    return masks


def test_the_mask_is_as_wide_as_the_models_logits(masks, generator):
    [[mask]], _ = masks([{}])
    assert mask.allowed().shape == (generator.model.config.vocab_size,)
    assert not mask.allowed()[generator.tokenizer.vocab_size :].any()


def test_compiled_grammars_are_kept_and_their_number_is_bounded(masks, monkeypatch):
    compiled = []
    there = Grammars._compile

    async def counted(self, grammar, param):
        compiled.append(grammar)
        return await there(self, grammar, param)

    monkeypatch.setattr(Grammars, "_compile", counted)
    _, made = masks([{"const": number} for number in (0, 1, 2, 3, 3, 2)], count=8, grammars=3)
    assert len(made) == 3
    assert len(compiled) == 4


def test_other_requests_do_not_wait_while_a_grammar_is_read(server, monkeypatch):
    """It is read in a thread that runs no event loop."""
    for module in (chat, completions):
        monkeypatch.setattr(module, "wanted_grammar", outside_of_a_loop(module.wanted_grammar))
    wanted = {"response_format": by_schema({"const": 1}), "model": "nano"}
    with server.http() as http:
        for path, asked in (("chat/completions", request()), ("completions", {"prompt": "go"})):
            response = http.post(f"/v1/{path}", json={**asked, **wanted})
            assert response.status_code == 200, response.text


def outside_of_a_loop(work):
    def checked(*given):
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        return work(*given)

    return checked


def test_a_schema_that_takes_too_long_to_compile_is_refused(masks):
    dear = {"properties": {f"p{i}": {"type": "string", "maxLength": 1000} for i in range(1000)}}
    begun = time.perf_counter()
    with pytest.raises(ApiError, match="to compile") as error:
        masks([dear], schema_seconds=0.05)
    assert error.value.status == 400
    assert time.perf_counter() - begun < 5


def test_the_end_does_not_wait_for_a_grammar_that_is_compiled(masks, monkeypatch):
    _, made = masks([])
    grammar, door = json_grammar({"const": 1}, Limits(), param="p"), threading.Event()
    monkeypatch.setattr(llguidance, "LLMatcher", lambda *_, **__: door.wait(20))

    async def give_up():
        asked = asyncio.ensure_future(made.masks(grammar, 1, param="p"))
        while not made.compiling:
            assert not asked.done()
            await asyncio.sleep(0.01)

    begun = time.monotonic()
    asyncio.run(give_up())
    assert time.monotonic() - begun < 10
    assert made.compiling
    door.set()


def test_a_grammar_that_grows_with_its_answer_ends_that_request():
    """As many places to be in as there are texts of 19 letters."""
    words = ["".join(letters).encode() for length in range(1, 6) for letters in product("ab", repeat=length)]
    known = grammar_child.vocabulary([*words, b"<end>"], [len(words)], [len(words)])
    grammar = regex_grammar("(a|b)*a(a|b){18}", Limits(), param="p")
    matcher = llguidance.LLMatcher(known, grammar, log_level=0, limits=grammar_child.limits())
    mask, dice = GrammarMask(matcher, len(words) + 1), random.Random(0)
    with pytest.raises(ApiError, match="followed further"):
        for _ in range(3000):
            mask.allowed()
            mask.take(dice.randrange(len(words)))


def test_masks_of_one_grammar_do_not_share_a_place(masks):
    [[first, second]], _ = masks([{"const": "ab"}], count=2)
    begin = first.allowed().nonzero().flatten().tolist()[0]
    first.take(begin)
    assert second.allowed()[begin]
    assert not first.allowed()[begin]


def test_a_token_that_the_grammar_forbids_ends_the_request(masks):
    [[mask]], _ = masks([{"const": "ab"}])
    with pytest.raises(ApiError, match="followed"):
        mask.take((~mask.allowed()).nonzero().flatten().tolist()[-100])
