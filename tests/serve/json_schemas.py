"""Random JSON Schemas of the kinds that answers are held to."""

from hypothesis import strategies as st

NAMES = st.sampled_from(["a", "b", "name", "größe", "x-y", "with space", '"quoted"', ""])
# With control characters in them, listed names beside open ones are refused.
WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"], include_characters="\n\t"), max_size=5)
PATTERNS = st.sampled_from([r"^[a-z]{1,4}$", r"^CVE-[0-9]{4}$", r"^(yes|no)$", r"[0-9]", r"^\d{2}:\d{2}$"])
WHOLE = st.integers(-(2**53), 2**53)  # beyond, a schema is refused
FORMATS = st.sampled_from(["date", "uuid", "ipv4", "email", "date-time", "time"])


@st.composite
def _strings(draw):
    kind = draw(st.sampled_from(["length", "pattern", "format"]))
    if kind == "pattern":
        return {"type": "string", "pattern": draw(PATTERNS)}
    if kind == "format":
        return {"type": "string", "format": draw(FORMATS)}
    low = draw(st.integers(0, 4))
    return {"type": "string", "minLength": low, "maxLength": low + draw(st.integers(0, 8))}


@st.composite
def _numbers(draw):
    kind = draw(st.sampled_from(["integer", "number"]))
    low = draw(st.integers(-1000, 1000))
    schema = {"type": kind, "minimum": low, "maximum": low + draw(st.integers(1, 5000))}
    if draw(st.booleans()):
        schema["exclusiveMaximum"] = schema.pop("maximum")
    if kind == "integer" and draw(st.booleans()):
        schema = {"type": "integer", "multipleOf": draw(st.integers(1, 12)), "minimum": 0, "maximum": 1000}
    return schema


LEAVES = st.one_of(
    _strings(),
    _numbers(),
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.just({"type": ["boolean", "null"]}),
    st.builds(lambda values: {"enum": values}, st.lists(WORDS | WHOLE | st.none(), min_size=1, max_size=4)),
    st.builds(lambda value: {"const": value}, st.one_of(WORDS, st.booleans(), st.lists(st.integers(0, 9), max_size=2))),
)


@st.composite
def _arrays(draw, items):
    low = draw(st.integers(0, 2))
    schema = {"type": "array", "items": draw(items), "minItems": low, "maxItems": low + draw(st.integers(0, 3))}
    if draw(st.booleans()):
        schema["prefixItems"] = draw(st.lists(items, min_size=1, max_size=2))
    return schema


@st.composite
def _objects(draw, values):
    properties = draw(st.dictionaries(NAMES, values, max_size=4))
    required = draw(st.lists(st.sampled_from(sorted(properties)), unique=True)) if properties else []
    # what a property that nobody named may hold would be any JSON at all, without end
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    if draw(st.booleans()):
        schema["additionalProperties"] = {"type": "boolean"}
        if len(required) == len(properties):
            schema["maxProperties"] = len(properties) + 2
    return schema


def _either(schemas):
    return st.builds(lambda parts: {"anyOf": parts}, st.lists(schemas, min_size=1, max_size=3))


SCHEMAS = st.recursive(LEAVES, lambda inner: st.one_of(_arrays(inner), _objects(inner), _either(inner)), max_leaves=8)
