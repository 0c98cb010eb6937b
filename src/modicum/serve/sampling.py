"""A request's fields as the engine's parameters, and the grammar that it asks for."""

import secrets
from typing import Any

from modicum.generate import Generator, SamplingParams
from modicum.serve.constrain import client_grammar, json_grammar, regex_grammar
from modicum.serve.errors import bad_request
from modicum.serve.limits import Limits
from modicum.serve.requests import GrammarFormat, Sampling, SchemaFormat


def sampling_params(
    request: Sampling, generator: Generator, limits: Limits, *, max_tokens: int | None, top_logprobs: int
) -> list[SamplingParams]:
    """Parameters for each of the `n` answers: they differ in their seeds alone.

    max_tokens: None for all the room there is; the engine clamps it to that. Raises ApiError 400 beyond the limits.
    """
    choices = request.n or 1
    if choices > limits.choices:
        raise bad_request(f"n: at most {limits.choices} at once", "n")
    seed = secrets.randbits(48) if request.seed is None else request.seed % (1 << 64)
    return [
        SamplingParams(
            max_new_tokens=generator.context if max_tokens is None else min(max_tokens, generator.context),
            temperature=_or(request.temperature, 1.0),
            top_k=request.top_k or 0,
            top_p=_or(request.top_p, 1.0),
            min_p=request.min_p or 0.0,
            repetition_penalty=_or(request.repetition_penalty, 1.0),
            frequency_penalty=request.frequency_penalty or 0.0,
            presence_penalty=request.presence_penalty or 0.0,
            logit_bias=_biases(request.logit_bias or {}, generator),
            top_logprobs=top_logprobs,
            seed=seed + number,
            stop=_stops(request.stop, limits),
        )
        for number in range(choices)
    ]


def wanted_schema(request: Sampling) -> Any:
    """The JSON Schema that the answer must follow, or None."""
    wanted = request.response_format
    if isinstance(wanted, SchemaFormat):
        return wanted.json_schema.schema_
    if wanted is None or isinstance(wanted, GrammarFormat) or wanted.type == "text":
        return None
    return {"type": "object"}


def wanted_grammar(request: Sampling, limits: Limits) -> str | None:
    """llguidance's grammar of the answer, or None for free text."""
    wanted = request.response_format
    if isinstance(wanted, GrammarFormat):
        write = client_grammar if wanted.grammar.syntax == "lark" else regex_grammar
        return write(wanted.grammar.definition, limits, param="response_format")
    schema = wanted_schema(request)
    return None if schema is None else json_grammar(schema, limits, param="response_format")


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _stops(stop: str | list[str] | None, limits: Limits) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > limits.stops or any(not 0 < len(text) <= limits.stop_characters for text in stops):
        raise bad_request(
            f"stop: expected at most {limits.stops} strings of 1 to {limits.stop_characters} characters", "stop"
        )
    return tuple(stops)


def _biases(biases: dict[str, float], generator: Generator) -> dict[int, float]:
    size = generator.tokenizer.vocab_size
    if not all(key.isascii() and key.isdecimal() and len(key) < 10 and int(key) < size for key in biases):
        raise bad_request(f"logit_bias: expected keys that are token ids below {size}", "logit_bias")
    return {int(key): value for key, value in biases.items()}
