"""The official client in its four ways of asking, with one shape of result."""

import asyncio
import copy
from dataclasses import dataclass, field

import openai

WAYS = ("sync", "sync stream", "async", "async stream")


@dataclass
class Result:
    """texts, finish_reasons, calls, tokens: for each choice. `finishes`: how often each choice was finished."""

    texts: dict[int, str] = field(default_factory=dict)
    finish_reasons: dict[int, str] = field(default_factory=dict)
    finishes: dict[int, int] = field(default_factory=dict)
    calls: dict[int, list[dict]] = field(default_factory=dict)
    tokens: dict[int, list] = field(default_factory=dict)
    usage: object = None
    models: set = field(default_factory=set)
    pieces: list[str] = field(default_factory=list)

    def finish(self, choice):
        if choice.finish_reason is not None:
            self.finish_reasons[choice.index] = choice.finish_reason
            self.finishes[choice.index] = self.finishes.get(choice.index, 0) + 1

    def say(self, index, text):
        self.texts[index] = self.texts.get(index, "") + (text or "")
        self.pieces.append(text or "")

    def note(self, choice):
        if choice.logprobs is not None and getattr(choice.logprobs, "content", None):
            self.tokens.setdefault(choice.index, []).extend(choice.logprobs.content)


def _add_whole(result, answer):
    result.usage = answer.usage
    result.models.add(answer.model)
    for choice in answer.choices:
        message = getattr(choice, "message", None)
        result.say(choice.index, choice.text if message is None else message.content)
        result.finish(choice)
        result.note(choice)
        for call in (message and message.tool_calls) or []:
            one = {"id": call.id, "name": call.function.name, "arguments": call.function.arguments}
            result.calls.setdefault(choice.index, []).append(one)


def _add_piece(result, chunk):
    result.models.add(chunk.model)
    if chunk.usage is not None:
        assert result.usage is None
        assert not chunk.choices
        result.usage = chunk.usage
    for choice in chunk.choices:
        assert choice.index not in result.finishes, "a choice goes on after its end"
        delta = getattr(choice, "delta", None)
        result.say(choice.index, choice.text if delta is None else delta.content)
        for call in (delta and delta.tool_calls) or []:
            calls = result.calls.setdefault(choice.index, [])
            if call.id is not None:
                assert call.index == len(calls)
                calls.append({"id": call.id, "name": call.function.name, "arguments": ""})
            calls[call.index]["arguments"] += call.function.arguments
        result.finish(choice)
        result.note(choice)


def ask(address, way, request, *, kind="chat"):
    """The Result of one request, a completion or (kind "text") a plain continuation."""
    request = {"model": "nano", **copy.deepcopy(request)}
    options = {"base_url": f"{address}/v1", "api_key": "none", "max_retries": 0}
    if "stream" in way:
        request |= {"stream": True, "stream_options": {"include_usage": True}}
    result = Result()

    def method(client):
        return (client.chat.completions if kind == "chat" else client.completions).create

    async def later():
        async with openai.AsyncOpenAI(**options) as client:
            answer = await method(client)(**request)
            if "stream" in way:
                async for chunk in answer:
                    _add_piece(result, chunk)
            else:
                _add_whole(result, answer)

    if way.startswith("async"):
        asyncio.run(later())
        return result
    with openai.OpenAI(**options) as client:
        answer = method(client)(**request)
        if "stream" in way:
            for chunk in answer:
                _add_piece(result, chunk)
        else:
            _add_whole(result, answer)
    return result
