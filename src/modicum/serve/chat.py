"""POST /v1/chat/completions: a conversation in, its next message out, whole or as it comes."""

import secrets
from collections.abc import AsyncIterator
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from modicum.generate import Chunk
from modicum.serve.answers import Answers, EventStream, unless_disconnected
from modicum.serve.constrain import GrammarMask, lark_grammar
from modicum.serve.errors import bad_request, json_response
from modicum.serve.guard import owner_of
from modicum.serve.head import Head
from modicum.serve.limits import Limits
from modicum.serve.logprobs import TokenLog, chat_logprobs
from modicum.serve.prompts import Prompt, chat_prompt
from modicum.serve.requests import ChatRequest, GrammarFormat, Tool
from modicum.serve.responses import (
    AssistantMessage,
    Call,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    Delta,
    FinishReason,
    TokenLogprob,
)
from modicum.serve.sampling import sampling_params, wanted_grammar, wanted_schema
from modicum.serve.service import Served, Service
from modicum.serve.tools import Arguments, CallReader, Done, Event, Text, call_grammar, offered
from modicum.serve.tools import Call as CallBegins


async def complete_chat(service: Service, request: Request, body: ChatRequest) -> Response:
    """The response to one request. Raises ApiError before anything has been sent."""
    served = service.ready(body.model)
    service.note(body)
    if body.top_logprobs and not body.logprobs:
        raise bad_request("top_logprobs: needs logprobs: true", "top_logprobs")
    tools = offered(body, service.limits)
    if tools and not served.tools:
        raise bad_request("tools: this model's chat template has no words for them", "tools", "unsupported")
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    params = sampling_params(
        body, served.generator, served.limits, max_tokens=limit, top_logprobs=body.top_logprobs or 0
    )
    prompt = await service.prepare(partial(chat_prompt, served.generator, body.messages, tools))
    masks = await _masks(service, served, body, tools)
    tickets = served.submit([prompt], params, masks, owner_of(request))
    answers = Answers(tickets, service.limits)
    choices = [_Choice(served, body, prompt, bool(tools)) for _ in params]
    head = Head.new("chatcmpl", served)
    if body.stream:
        usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        return EventStream(_chunks(head, answers, choices, usage), answers)
    whole = await unless_disconnected(request, _whole(head, answers, choices))
    return Response(status_code=499) if whole is None else json_response(whole)


async def _masks(
    service: Service, served: Served, body: ChatRequest, tools: list[Tool]
) -> "list[GrammarMask] | list[None]":
    count = body.n or 1
    if not tools and body.response_format is None:
        return [None] * count
    grammar = await service.prepare(partial(_grammar, body, tools, served.limits))
    param = "tools" if tools else "response_format"
    return [None] * count if grammar is None else await served.grammars.masks(grammar, count, param=param)


def _grammar(body: ChatRequest, tools: list[Tool], limits: Limits) -> str | None:
    if not tools:
        return wanted_grammar(body, limits)
    if isinstance(body.response_format, GrammarFormat):
        raise bad_request("response_format: a grammar and tools cannot be had together", "response_format")
    return lark_grammar(call_grammar(body, tools, wanted_schema(body), limits), limits.for_tools(), param="tools")


class _Choice:
    """One answer as it becomes a message: chunks in, deltas out."""

    def __init__(self, served: Served, body: ChatRequest, prompt: Prompt, tools: bool) -> None:
        self._reader = CallReader(json_or_calls=wanted_schema(body) is not None) if tools else None
        self._log = TokenLog(served.generator.tokenizer, served.silent, prompt.ids[-1]) if body.logprobs else None
        self._folded = prompt.folded
        self._calls: list[Call] = []
        self._whole_calls = 0
        self._said: list[str] = []
        self.entries: list[TokenLogprob] | None = None if self._log is None else []
        self.finish_reason: FinishReason | None = None

    def feed(self, chunk: Chunk) -> tuple[list[Delta], list[TokenLogprob] | None]:
        """What the client learns by this chunk."""
        text = chunk.text
        if self._folded and text:
            text, self._folded = text.removeprefix(" "), False
        deltas = [self._delta(event) for event in self._events(text, last=chunk.finish_reason is not None)]
        entries = None if self._log is None else self._log.entries(chunk)
        if self.entries is not None and entries:
            self.entries += entries
        if chunk.finish_reason is not None:
            cut = chunk.finish_reason == "length"
            self.finish_reason = "length" if cut else "tool_calls" if self._whole_calls else "stop"
        return [delta for delta in deltas if delta], entries

    def _events(self, text: str, *, last: bool) -> list[Event]:
        if self._reader is None:
            return [Text(text)] if text else []
        return [*self._reader.feed(text), *(self._reader.finish() if last else ())]

    def _delta(self, event: Event) -> Delta:
        index = len(self._calls) - 1
        if isinstance(event, Text):
            self._said.append(event.text)
            return {"content": event.text}
        if isinstance(event, CallBegins):
            call: Call = {
                "id": f"call_{secrets.token_hex(12)}",
                "type": "function",
                "function": {"name": event.name, "arguments": ""},
            }
            self._calls.append(call)
            begun = {"name": event.name, "arguments": ""}
            return {"tool_calls": [{"index": index + 1, "id": call["id"], "type": "function", "function": begun}]}  # type: ignore[typeddict-item]
        if isinstance(event, Arguments):
            self._calls[index]["function"]["arguments"] += event.text
            return {"tool_calls": [{"index": index, "function": {"arguments": event.text}}]}
        assert isinstance(event, Done)
        self._whole_calls += 1
        return {}

    def message(self) -> AssistantMessage:
        """All of it."""
        said = "".join(self._said)
        message: AssistantMessage = {"role": "assistant", "content": said, "refusal": None}
        if self._calls:
            message["content"] = said or None
            message["tool_calls"] = self._calls
        return message


async def _whole(head: Head, answers: Answers, choices: list[_Choice]) -> ChatCompletion:
    async for number, chunk in answers:
        choices[number].feed(chunk)
    done: list[ChatChoice] = []
    for index, choice in enumerate(choices):
        assert choice.finish_reason is not None
        logprobs = None if choice.entries is None else chat_logprobs(choice.entries)
        done.append(
            {
                "index": index,
                "message": choice.message(),
                "logprobs": logprobs,
                "finish_reason": choice.finish_reason,
            }
        )
    return {**head.fields(), "object": "chat.completion", "choices": done, "usage": answers.usage()}


async def _chunks(
    head: Head, answers: Answers, choices: list[_Choice], include_usage: bool
) -> AsyncIterator[ChatChunk]:
    def chunk(index: int, delta: Delta, entries: list[TokenLogprob] | None, reason: FinishReason | None) -> ChatChunk:
        logprobs = chat_logprobs(entries) if entries else None
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        made = {**head.fields(), "object": "chat.completion.chunk", "choices": [choice]}
        return made | {"usage": None} if include_usage else made  # type: ignore[return-value]

    for index in range(len(choices)):
        yield chunk(index, {"role": "assistant", "content": ""}, None, None)
    async for index, piece in answers:
        deltas, entries = choices[index].feed(piece)
        if entries and not deltas:
            deltas = [{"content": ""}]
        for place, delta in enumerate(deltas):
            yield chunk(index, delta, entries if place == 0 else None, None)
        if (reason := choices[index].finish_reason) is not None:
            yield chunk(index, {}, None, reason)
    if include_usage:
        yield {**head.fields(), "object": "chat.completion.chunk", "choices": [], "usage": answers.usage()}
