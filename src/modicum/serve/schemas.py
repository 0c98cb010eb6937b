"""JSON Schemas of clients: held in full, or refused by the name of the keyword that cannot be, and its place.

llguidance refuses keywords of JSON Schema that it does not have. It passes over those that JSON Schema does not have,
misspelt ones among them, and a few that it has hold less than they say. Two of those are let pass: `format` holds how a
text is written, so that a date may be a day that its month has not, and `.` in `pattern` is all but a line feed, where
ECMAScript leaves out other ends of lines too.
"""

import json
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import unquote

from modicum.serve.errors import ApiError, bad_request
from modicum.serve.limits import Limits

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# What llguidance 1.9 has: IMPLEMENTED in its parser/src/json/schema.rs, by where schemas stand in it.
_OF_NAMES = frozenset({"properties", "patternProperties"})
_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_SINGLE = frozenset({"items", "additionalItems", "additionalProperties"})
_PLAIN = frozenset({
    "$ref", "const", "enum", "type", "minItems", "maxItems", "required", "minProperties", "maxProperties", "minLength",
    "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
})  # fmt: skip
FOLLOWED = _OF_NAMES | _LISTS | _SINGLE | _PLAIN
# They say nothing of what is valid, or wait to be referred to; so does whatever begins with x-.
_DEFINITIONS = frozenset({"$defs", "definitions"})
_AT_THE_ROOT = frozenset({"$schema", "$id", "id"})
ANNOTATIONS = _DEFINITIONS | {
    "$anchor", "$comment", "title", "description", "default", "example", "examples", "deprecated", "readOnly",
    "writeOnly", "contentMediaType", "contentEncoding", "discriminator",
}  # fmt: skip
_NUMBERS = ("const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_LARGEST = 1 << 53  # llguidance counts in float64
# White space between the parts of JSON: without a bound, a small model can go on with it for ever.
_SPACE = r"( |\n {0,32})?"
# Of a schema within a schema: that of the one around it, the keyword, and the name or number there. None: the root.
_Place: TypeAlias = "tuple[_Place, str, str | None] | None"
_ESCAPED = re.compile(r"\x7f|(?<!\\)(?:\\\\)*\\u00")


def check_schema(schema: Any, limits: Limits, param: str) -> None:
    """Raises ApiError 400 for a schema of too many bytes or levels, and for one that cannot be held in full."""
    if _depth(schema) > limits.schema_depth:
        raise bad_request(f"{param}: nested more than {limits.schema_depth} levels deep", param)
    if len(json.dumps(schema)) > limits.schema_bytes:
        raise bad_request(f"{param}: more than {limits.schema_bytes:,} bytes", param)
    nodes = list(_nodes(schema))
    anchors = {str(node["$anchor"]) for _, node in nodes if isinstance(node, dict) and "$anchor" in node}
    escapes = _needs_escapes(schema)
    for place, node in nodes:
        if not isinstance(node, dict):
            continue
        for keyword in node:
            if not _known(keyword, root=place is None):
                raise _refusal(param, place, _unknown(keyword, root=place is None))
        if fault := _fault(node, escapes) or _lost(node, schema, anchors):
            raise _refusal(param, place, fault)


def compiled_as(schema: Any) -> "tuple[Any, JsonCompileOptions]":
    """A checked schema as llguidance gets it, and with which options.

    Without the names at its root, of which one would choose an older draft, with other keywords. A name or a string
    could be spelt with \\u escapes past what it must not be; they are had only where a schema needs them.
    """
    if isinstance(schema, dict):
        schema = {keyword: value for keyword, value in schema.items() if keyword not in _AT_THE_ROOT}
    escapes = 'nrbtf\\"u' if _needs_escapes(schema) else 'nrbtf\\"'
    return schema, {"whitespace_pattern": _SPACE, "json_allowed_escapes": escapes}


def spaced(schema: Any) -> str:
    """A checked schema as a Lark grammar may hold it (`%json ...`), with the same options."""
    schema, options = compiled_as(schema)
    made = schema if isinstance(schema, dict) else {"allOf": [schema]}
    return json.dumps({**made, "x-guidance": options})


def _nodes(schema: Any) -> Iterator[tuple[_Place, Any]]:
    """Every schema within a schema, itself first, and its place."""
    waiting = deque[tuple[_Place, Any]]([(None, schema)])
    while waiting:
        place, node = waiting.popleft()
        yield place, node
        for keyword, value in node.items() if isinstance(node, dict) else ():
            if keyword in _OF_NAMES | _DEFINITIONS and isinstance(value, dict):
                waiting.extend(((place, keyword, name), child) for name, child in value.items())
            elif isinstance(value, list) and (keyword in _LISTS or keyword == "items"):
                waiting.extend(((place, keyword, str(number)), child) for number, child in enumerate(value))
            elif keyword in _SINGLE:
                waiting.append(((place, keyword, None), value))


def _written(place: _Place) -> str:
    """A place as `$ref` writes it."""
    parts = list[str]()
    while place is not None:
        place, keyword, name = place
        parts += [keyword] if name is None else [_escaped(name), keyword]
    return "/".join(["#", *reversed(parts)])


def _is_place(target: str, schema: Any) -> bool:
    """Whether a schema stands there in a schema."""
    first, *parts = target.split("/")
    waiting, node = deque(parts), schema
    while waiting and isinstance(node, dict):
        keyword = waiting.popleft()
        value = node.get(keyword)
        if keyword in _OF_NAMES | _DEFINITIONS and isinstance(value, dict):
            part = waiting.popleft() if waiting else "~"  # as no name is written
            name = part.replace("~1", "/").replace("~0", "~")
            if name not in value or _escaped(name) != part:
                return False
            node = value[name]
        elif isinstance(value, list) and (keyword in _LISTS or keyword == "items"):
            part = waiting.popleft() if waiting else ""
            number = int(part) if part.isdecimal() and len(part) < 10 else len(value)
            if number >= len(value) or str(number) != part:
                return False
            node = value[number]
        elif keyword in _SINGLE and keyword in node:
            node = value
        else:
            return False
    return first == "#" and not waiting


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _known(keyword: str, *, root: bool) -> bool:
    if keyword in _AT_THE_ROOT or keyword == "x-guidance":
        return root and keyword != "x-guidance"
    return keyword in FOLLOWED or keyword in ANNOTATIONS or keyword.startswith("x-")


def _unknown(keyword: str, *, root: bool) -> str:
    if keyword in _AT_THE_ROOT and not root:
        return f"{keyword} can stand at the schema's root alone"
    meant = get_close_matches(keyword, sorted(FOLLOWED), n=1, cutoff=0.8)
    hint = f"; did you mean {meant[0]}?" if meant else ""
    return f"the keyword {keyword[:60]!a} is not one that answers can be held to{hint}"


def _lost(node: Mapping[str, Any], schema: Any, anchors: set[str]) -> str | None:
    """Whether its reference leads nowhere. An anchor with a slash would pass for a place."""
    target = node.get("$ref")
    if not isinstance(target, str):
        return None
    plain = unquote(target)
    named = plain.startswith("#") and "/" not in plain and plain[1:] in anchors
    return None if named or _is_place(plain, schema) else f"$ref {target[:60]!a} leads to no schema in here"


def _fault(node: Mapping[str, Any], escapes: bool) -> str | None:
    """What of a schema's known keywords llguidance would not follow."""
    listed = isinstance(node.get("items"), list)
    if "additionalItems" in node and not listed:
        return "additionalItems needs items that is a list; without one, items says what the others are"
    if "prefixItems" in node and listed:
        return "prefixItems and items that is a list say the same; use prefixItems, and items for the others"
    required = node.get("required")
    least, names = node.get("minProperties"), len(set(map(str, required))) if isinstance(required, list) else 0
    if isinstance(least, int) and least > names + 1:
        return "minProperties cannot be held beyond one more than there are names in required"
    for keyword in _NUMBERS:
        if keyword in node and _too_large(node[keyword]):
            return f"{keyword} holds a whole number beyond 2^53, which cannot be told from its neighbours"
    listing = "properties" in node or "patternProperties" in node
    if escapes and listing and node.get("additionalProperties") is not False:
        return "with control characters in the schema's texts, listed properties need additionalProperties: false"
    return None


def _too_large(value: Any) -> bool:
    if isinstance(value, list | dict):
        return any(map(_too_large, _children(value)))
    return isinstance(value, int) and abs(value) > _LARGEST


def _needs_escapes(schema: Any) -> bool:
    """Whether it may hold a character that JSON can write as \\u alone."""
    return _ESCAPED.search(json.dumps(schema, ensure_ascii=False)) is not None


def _refusal(param: str, place: _Place, fault: str) -> ApiError:
    return bad_request(f"{param}: at {_written(place)[:200]!a}: {fault}", param, "unsupported_grammar")


def _depth(value: Any) -> int:
    deep, level = 0, [value]
    while level:
        level = [child for node in level for child in _children(node)]
        deep += 1
    return deep


def _children(node: Any) -> Sequence[Any]:
    return list(node.values()) if isinstance(node, dict) else node if isinstance(node, list) else ()
