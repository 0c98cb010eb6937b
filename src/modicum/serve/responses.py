"""What clients get: the objects of the OpenAI API, as types for our own code and for the published description."""

from typing import Literal

from typing_extensions import NotRequired, TypedDict  # noqa: UP035 (pydantic needs them before Python 3.12)

FinishReason = Literal["stop", "length", "tool_calls"]


class Alternative(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Alternative):
    top_logprobs: list[Alternative]


class ChoiceLogprobs(TypedDict):
    content: list[TokenLogprob]
    refusal: None


class CachedTokens(TypedDict):
    cached_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class FunctionCall(TypedDict):
    name: NotRequired[str]
    arguments: str


class CallDelta(TypedDict):
    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionCall


class Delta(TypedDict):
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str | None]
    tool_calls: NotRequired[list[CallDelta]]


class Call(TypedDict):
    id: str
    type: Literal["function"]
    function: FunctionCall


class AssistantMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: NotRequired[list[Call]]


class ChatChoice(TypedDict):
    index: int
    message: AssistantMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: FinishReason


class ChatChunkChoice(TypedDict):
    index: int
    delta: Delta
    logprobs: ChoiceLogprobs | None
    finish_reason: FinishReason | None


class _Head(TypedDict):
    id: str
    created: int
    model: str
    system_fingerprint: str


class ChatCompletion(_Head):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage


class ChatChunk(_Head):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]


class LegacyLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class TextChoice(TypedDict):
    index: int
    text: str
    logprobs: LegacyLogprobs | None
    finish_reason: FinishReason | None


class TextCompletion(_Head):
    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: NotRequired[Usage | None]


class Model(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    context: int


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[Model]


class Health(TypedDict):
    status: Literal["ok", "loading", "failed", "draining"]
