"""What clients may send: the fields of the OpenAI API that are understood here. Others are ignored."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

Finite = Annotated[float, Field(allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
T = TypeVar("T")
# The first fault ends it: one of a million items, each wrong, would otherwise be a gigabyte of faults.
Several = Annotated[list[T], Field(fail_fast=True)]
# A dict knows no fail_fast: its size bounds its faults, of which so many are a megabyte.
MOST_BIASES = 1024


# Fields by which older or other servers are asked for constrained answers, and what is asked here in their place.
_FORMS = {
    "functions": "tools of /v1/chat/completions",
    "function_call": "tool_choice of /v1/chat/completions",
    "guided_json": "response_format of type json_schema",
    "guided_choice": "response_format of type json_schema, with enum",
    "guided_regex": "response_format of type grammar, syntax regex",
    "guided_grammar": "response_format of type grammar, syntax lark",
    "structured_outputs": "response_format",
    "json_schema": "response_format of type json_schema",
    "regex": "response_format of type grammar, syntax regex",
    "grammar": "response_format of type grammar, syntax lark",
    "ebnf": "response_format of type grammar, syntax lark",
}
_SCHEMAS = dict.fromkeys(("schema_", "json_schema"), "type json_schema")  # within a response_format of another type
_TOOLS = dict.fromkeys(("tools", "tool_choice"), "/v1/chat/completions")


def _elsewhere(value: object, info: ValidationInfo) -> None:
    """Ignoring such a field would leave the answer free where its client counts on its form."""
    if value is not None:
        use = (_FORMS | _TOOLS | _SCHEMAS)[str(info.field_name)]
        raise PydanticCustomError("elsewhere", "not understood here; use {use}", {"use": use})


class _Fields(BaseModel):
    model_config = ConfigDict(extra="ignore")


class JsonSchema(_Fields):
    name: str = Field(default="", max_length=64)
    strict: bool | None = None
    schema_: dict[str, Any] = Field(alias="schema")


class PlainFormat(_Fields):
    type: Literal["text", "json_object"]
    schema_: None = Field(default=None, alias="schema")
    json_schema: None = None

    _no_schema = field_validator(*_SCHEMAS, mode="before")(_elsewhere)


class SchemaFormat(_Fields):
    type: Literal["json_schema"]
    json_schema: JsonSchema


class GrammarText(_Fields):
    syntax: Literal["lark", "regex"]
    definition: str


class GrammarFormat(_Fields):
    """Ours: the answer follows a regular expression or a Lark grammar."""

    type: Literal["grammar"]
    grammar: GrammarText


ResponseFormat = Annotated[PlainFormat | SchemaFormat | GrammarFormat, Field(discriminator="type")]


class StreamOptions(_Fields):
    include_usage: bool | None = None


class Sampling(_Fields):
    """What both kinds of completion have in common. `user` and unknown fields are ignored, but for those that ask for a
    form."""

    model: str
    max_tokens: int | None = Field(default=None, ge=0)
    temperature: Annotated[Finite, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Finite, Field(ge=0, le=1)] | None = None
    top_k: int | None = Field(default=None, ge=0, lt=1 << 31)
    min_p: Annotated[Finite, Field(ge=0, le=1)] | None = None
    frequency_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Finite, Field(ge=0.01, le=100)] | None = None
    logit_bias: dict[str, Annotated[Finite, Field(ge=-100, le=100)]] | None = None
    n: int | None = Field(default=None, ge=1, le=128)
    seed: int | None = Field(default=None, ge=-(1 << 63), lt=1 << 63)
    stop: str | Several[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    functions: None = None
    function_call: None = None
    guided_json: None = None
    guided_choice: None = None
    guided_regex: None = None
    guided_grammar: None = None
    structured_outputs: None = None
    json_schema: None = None
    regex: None = None
    grammar: None = None
    ebnf: None = None

    _no_other_words = field_validator(*_FORMS, mode="before")(_elsewhere)

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _not_too_many(cls, value: object) -> object:
        if isinstance(value, dict) and len(value) > MOST_BIASES:
            raise PydanticCustomError("too_many", "expected at most {most} tokens", {"most": MOST_BIASES})
        return value


class CompletionRequest(Sampling):
    """POST /v1/completions. A prompt is text, token ids, or a list of either."""

    prompt: str | Several[str] | Several[TokenId] | Several[Several[TokenId]] = ""
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=20)
    suffix: str | None = None
    best_of: int | None = Field(default=None, ge=1, le=128)
    tools: None = None
    tool_choice: None = None

    _no_tools = field_validator(*_TOOLS, mode="before")(_elsewhere)


class TextPart(_Fields):
    type: Literal["text"]
    text: str


class CalledFunction(_Fields):
    name: str
    arguments: str = "{}"


class ToolCall(_Fields):
    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(_Fields):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Several[TextPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Several[ToolCall] | None = None


class Function(_Fields):
    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Fields):
    type: Literal["function"]
    function: Function


class FunctionName(_Fields):
    name: str


class NamedTool(_Fields):
    type: Literal["function"]
    function: FunctionName


class ChatRequest(Sampling):
    """POST /v1/chat/completions."""

    messages: Annotated[Several[Message], Field(min_length=1)]
    max_completion_tokens: int | None = Field(default=None, ge=0)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    tools: Several[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
