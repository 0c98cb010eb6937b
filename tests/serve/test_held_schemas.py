"""Every keyword of a client's schema is held, says nothing of what is valid, or is refused by its name and place."""

import json
import tracemalloc

import jsonschema
import llguidance
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from json_schemas import SCHEMAS
from jsonschema_specifications import REGISTRY as SPECIFICATIONS

from modicum.serve import Limits, grammar_child, schemas
from modicum.serve.constrain import client_grammar, json_grammar
from modicum.serve.errors import ApiError
from modicum.serve.schemas import ANNOTATIONS, FOLLOWED, check_schema

NULL, FLAG = {"type": "null"}, {"type": "boolean"}
ITEMS = {"type": "array", "items": [NULL], "additionalItems": FLAG}
# Of each keyword a schema that needs it, a text that it allows, and one that it forbids.
HELD = {
    "anyOf": ({"anyOf": [NULL, FLAG]}, "true", "3"),
    "oneOf": ({"oneOf": [NULL, FLAG]}, "true", "3"),
    "allOf": ({"allOf": [{"type": "integer"}, {"minimum": 5}]}, "5", "4"),
    "$ref": ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": NULL}}, "null", "1"),
    "const": ({"const": {"a": [1]}}, '{"a":[1]}', '{"a":[2]}'),
    "enum": ({"enum": ["a", 2]}, "2", '"b"'),
    "type": ({"type": ["string", "null"]}, '"a"', "1"),
    "items": ({"type": "array", "items": NULL}, "[null]", "[1]"),
    "additionalItems": (ITEMS, "[null,true]", "[null,null]"),
    "prefixItems": ({"type": "array", "prefixItems": [NULL]}, "[null]", "[1]"),
    "minItems": ({"type": "array", "items": NULL, "minItems": 1}, "[null]", "[]"),
    "maxItems": ({"type": "array", "items": NULL, "maxItems": 1}, "[null]", "[null,null]"),
    "properties": ({"type": "object", "properties": {"a": NULL}}, '{"a":null}', '{"a":1}'),
    "patternProperties": ({"type": "object", "patternProperties": {"^a": NULL}}, '{"ab":null}', '{"ab":1}'),
    "additionalProperties": ({"type": "object", "additionalProperties": FLAG}, '{"a":true}', '{"a":1}'),
    "required": ({"type": "object", "required": ["a"]}, '{"a":1}', "{}"),
    "minProperties": ({"type": "object", "minProperties": 1}, '{"a":1}', "{}"),
    "maxProperties": ({"type": "object", "maxProperties": 1}, '{"a":1}', '{"a":1,"b":2}'),
    "minLength": ({"type": "string", "minLength": 2}, '"ab"', '"a"'),
    "maxLength": ({"type": "string", "maxLength": 2}, '"ab"', '"abc"'),
    "pattern": ({"type": "string", "pattern": "^[ab]$"}, '"a"', '"c"'),
    "format": ({"type": "string", "format": "date"}, '"2024-02-28"', '"2024-02-40"'),
    "minimum": ({"type": "integer", "minimum": 3}, "3", "2"),
    "maximum": ({"type": "integer", "maximum": 3}, "3", "4"),
    "exclusiveMinimum": ({"type": "number", "exclusiveMinimum": 3}, "3.5", "3"),
    "exclusiveMaximum": ({"type": "number", "exclusiveMaximum": 3}, "2.5", "3"),
    "multipleOf": ({"type": "integer", "multipleOf": 3}, "9", "8"),
}
BYTES = grammar_child.vocabulary([*(bytes([byte]) for byte in range(256)), b"<end>"], [256], [256])


LOST = [
    "",
    "anyOf",
    "anyOf/1",
    "anyOf/00",
    "anyOf/x",
    "properties",
    "properties/a/b",
    "properties/a",
    "anyOf/0/type",
    "items",
]


def allows(grammar, text):
    matcher = llguidance.LLMatcher(BYTES, grammar, log_level=0, limits=grammar_child.limits())
    assert not matcher.is_error(), matcher.get_error()
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


def said_of(schema):
    """What a client is told about a schema."""
    with pytest.raises(ApiError) as error:
        check_schema(schema, Limits(), "p")
    assert (error.value.status, error.value.param, error.value.code) == (400, "p", "unsupported_grammar")
    return error.value.message


@pytest.mark.parametrize("keyword", sorted(FOLLOWED))
def test_each_keyword_is_held(keyword):
    schema, good, bad = HELD[keyword]
    draft = jsonschema.Draft201909Validator if keyword == "additionalItems" else jsonschema.Draft202012Validator
    validator = draft(schema, format_checker=jsonschema.FormatChecker(["date"]))
    assert validator.is_valid(json.loads(good))
    assert not validator.is_valid(json.loads(bad))
    grammar = json_grammar(schema, Limits(), param="p")
    assert allows(grammar, good)
    assert not allows(grammar, bad)


def test_keywords_of_any_draft_of_json_schema_that_are_not_held_are_refused():
    drafts = [SPECIFICATIONS[name].contents for name in SPECIFICATIONS]
    others = {word for draft in drafts for word in draft.get("properties", {})} - FOLLOWED - ANNOTATIONS
    others -= {"$schema", "$id", "id"}
    assert {"not", "if", "uniqueItems", "dependentRequired", "unevaluatedProperties"} <= others
    for keyword in others:
        assert keyword in said_of({"type": "array", "items": {keyword: {}}})


def places(schema, place="#"):
    """Each keyword of a schema of SCHEMAS: the object that it stands in, that one's place, and the keyword."""
    yield from ((schema, place, keyword) for keyword in schema)
    for keyword in ("items", "additionalProperties"):
        if isinstance(schema.get(keyword), dict):
            yield from places(schema[keyword], f"{place}/{keyword}")
    for keyword in ("anyOf", "prefixItems"):
        for number, child in enumerate(schema.get(keyword, [])):
            yield from places(child, f"{place}/{keyword}/{number}")
    for name, child in schema.get("properties", {}).items():
        yield from places(child, f"{place}/properties/{name}")


@settings(max_examples=60)
@given(SCHEMAS, st.data())
def test_a_misspelt_keyword_is_named_with_its_place(schema, data):
    schema = json.loads(json.dumps(schema))  # equal parts of it may be one object, and are drawn again
    node, place, keyword = data.draw(st.sampled_from(list(places(schema))))
    cut = data.draw(st.integers(0, len(keyword) - 1))
    misspelt = keyword[:cut] + keyword[cut + 1 :]
    assume(misspelt not in FOLLOWED | ANNOTATIONS)
    node[misspelt] = node.pop(keyword)
    message = said_of(schema)
    if "cannot be told" not in message and "control characters" not in message:  # another of its faults
        assert f"{misspelt!a}" in message
        assert f"at {place[:200]!a}" in message


@pytest.mark.parametrize(("misspelt", "meant"), [("requird", "required"), ("maxLenght", "maxLength")])
def test_what_was_meant_is_told(misspelt, meant):
    message = said_of({"type": "object", "properties": {"a": {misspelt: 3}}})
    assert message.startswith("p: at '#/properties/a': ")
    assert f"did you mean {meant}?" in message


def test_annotations_change_nothing():
    words = {word: "w" for word in ANNOTATIONS if not word.startswith(("$", "definitions"))} | {"x-order": 1}
    plain = {"type": "array", "items": {"type": "integer", "minimum": 3}, "maxItems": 1}
    told = {**plain, "items": {**plain["items"], **words}, **words, "$comment": "c", "$defs": {"d": NULL}}
    root = {"$schema": "http://json-schema.org/draft-04/schema#", "$id": "urn:a", "id": "urn:b"}
    grammar = json_grammar(root | told, Limits(), param="p")
    assert allows(grammar, "[3]")
    assert not allows(grammar, "[2]")


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"$ref": "#/default", "default": {"requird": 1}}, "$ref"),
        ({"$ref": "#/default", "default": {"requird": 1}, "$defs": {"a": {"$anchor": "/default"}}}, "$ref"),
        ({"$ref": "#/$defs/none", "$defs": {}}, "$ref"),
        ({"$ref": "https://example.org/s"}, "$ref"),
        *(({"$ref": f"#/{place}", "anyOf": [NULL], "properties": {"a/b": NULL}}, "$ref") for place in LOST),
        ({"$defs": {"a": {"$id": "urn:a"}}}, "$id"),
        ({"items": {"$schema": "http://json-schema.org/draft-04/schema#"}}, "$schema"),
        ({"type": "array", "prefixItems": [NULL], "additionalItems": False}, "additionalItems"),
        ({"type": "array", "prefixItems": [NULL], "items": [FLAG]}, "prefixItems"),
        ({"type": "object", "minProperties": 2, "additionalProperties": FLAG}, "minProperties"),
        ({"type": "object", "required": ["a", "a"], "minProperties": 3}, "minProperties"),
        ({"const": [2**53 + 1]}, "const"),
        ({"enum": [{"a": -(2**53) - 1}]}, "enum"),
        ({"type": "integer", "minimum": 2**60 + 1}, "minimum"),
        ({"properties": {"a": NULL, "b": {"const": "\x01"}}}, "additionalProperties"),
    ],
)
def test_what_would_be_held_in_part_is_refused(schema, word):
    assert word in said_of(schema)


@pytest.mark.parametrize("reference", ["#", "#/$defs/a%62", "#/properties/x", "#there", "#/anyOf/0", "#/$defs/~01~1"])
def test_references_within_a_schema_are_followed(reference):
    schema = {
        "$defs": {"ab": NULL, "~1/": NULL, "c": {"$anchor": "there", **NULL}},
        "anyOf": [NULL, {"properties": {"y": {"$ref": reference}}, "required": ["y"], "type": "object"}],
        "properties": {"x": NULL},
    }
    grammar = json_grammar(schema, Limits(), param="p")
    assert allows(grammar, '{"y":null}')
    assert not allows(grammar, '{"y":3}')


@pytest.mark.parametrize("text", ['{"\\u0061":true}', '{"a":null,"\\u0061":true}', '{"\\u000a":true}'])
@pytest.mark.parametrize("listed", [{"properties": {"a": NULL, "\n": NULL}}, {"patternProperties": {"^[a\n]": NULL}}])
def test_a_listed_name_cannot_be_spelt_as_another(listed, text):
    schema = {"type": "object", **listed, "additionalProperties": FLAG}
    assert not jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
    assert not allows(json_grammar(schema, Limits(), param="p"), text)


def test_control_characters_can_be_said_where_a_schema_holds_them():
    assert allows(json_grammar({"const": "\x01\x7f"}, Limits(), param="p"), '"\\u0001\\u007f"')


def test_a_schema_within_a_clients_grammar_is_held_as_one_by_itself():
    grammar = client_grammar('start: "a" x "b" x\nx: %json\n {"const": 3}\n', Limits(), param="p")
    assert allows(grammar, "a3b3")
    assert not allows(grammar, "a3b4")
    for schema in ('{"maxLenght": 3}', '{"type": "null", "x-guidance": {"lenient": true}, "not": {}}', "/x/", "{"):
        with pytest.raises(ApiError) as error:
            client_grammar(f"start: %json {schema}", Limits(), param="p")
        assert error.value.status == 400


@pytest.mark.parametrize(
    "text", ['"%json {}"', r'"\"%json 1"', "/%json {}/", r"/\/%json {}/", '"a" // %json {}', '"%json']
)
def test_the_letters_of_a_schema_elsewhere_are_refused_with_the_reason(text):
    with pytest.raises(ApiError, match="not in a string, a comment or a regular expression") as error:
        client_grammar(f"start: {text}", Limits(), param="p")
    assert error.value.status == 400


def test_strings_comments_and_expressions_before_a_schema_hide_nothing():
    text = r"""start: "\"/" A x // it's "so
        A: /[a"]\/+/
        x: %json {"const": 3}"""
    grammar = client_grammar(text, Limits(), param="p")
    assert allows(grammar, '"/a//3')
    assert not allows(grammar, '"/a//4')


def test_many_schemas_in_one_grammar_are_refused_by_what_they_come_to():
    with pytest.raises(ApiError, match="come to more than 262,144 bytes"):
        client_grammar("start: " + "%json 1 " * 8000, Limits(), param="p")


def test_long_names_above_many_schemas_are_not_written_for_each():
    schema = {"properties": {"n" * 30_000: {"properties": {f"{number}": {} for number in range(2600)}}}}
    tracemalloc.start()
    check_schema(schema, Limits(), "p")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10e6


@pytest.mark.parametrize(
    ("schema", "text"),
    [({"type": "string", "format": "date"}, '"2023-02-29"'), ({"type": "string", "pattern": "^.$"}, '"\u2028"')],
)
def test_what_is_held_less_than_it_says_is_named(schema, text):
    """The docstring of the page names both; where one is held one day, it is to go there."""
    assert allows(json_grammar(schema, Limits(), param="p"), text)
    assert all(word in schemas.__doc__ for word in ("`format`", "`pattern`"))
