"""POST /v1/completions: texts in, their continuations out, whole or as they come."""

from collections.abc import AsyncIterator
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from modicum.generate import Chunk
from modicum.serve.answers import Answers, EventStream, unless_disconnected
from modicum.serve.errors import bad_request, json_response
from modicum.serve.guard import owner_of
from modicum.serve.head import Head
from modicum.serve.logprobs import TokenLog
from modicum.serve.prompts import Prompt, completion_prompts, prompt_count
from modicum.serve.requests import CompletionRequest
from modicum.serve.responses import FinishReason, TextChoice, TextCompletion
from modicum.serve.sampling import sampling_params, wanted_grammar
from modicum.serve.service import Served, Service
from modicum.tokenizer import Tokenizer

# What OpenAI's API takes when a request does not say.
_MAX_TOKENS = 16


async def complete_text(service: Service, request: Request, body: CompletionRequest) -> Response:
    """The response to one request. Raises ApiError before anything has been sent."""
    served = service.ready(body.model)
    service.note(body)
    _refuse_unsupported(body)
    limit = _MAX_TOKENS if body.max_tokens is None else body.max_tokens
    params = sampling_params(body, served.generator, served.limits, max_tokens=limit, top_logprobs=body.logprobs or 0)
    count = prompt_count(body) * len(params)  # held against the limit before any of them costs time
    if count > served.limits.choices:
        raise bad_request(f"prompt: prompts times n is {count}, more than {served.limits.choices}", "prompt")
    prompts = await service.prepare(partial(completion_prompts, served.generator, body))
    choices = [_Choice(served, body, prompt, i) for i, prompt in enumerate(p for p in prompts for _ in params)]
    grammar = await service.prepare(partial(wanted_grammar, body, service.limits)) if body.response_format else None
    masks = [None] * count if grammar is None else await served.grammars.masks(grammar, count, param="response_format")
    tickets = served.submit(prompts, params, masks, owner_of(request))
    answers = Answers(tickets, service.limits)
    head = Head.new("cmpl", served)
    if body.stream:
        usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        return EventStream(_chunks(head, answers, choices, len(prompts), usage), answers)
    whole = await unless_disconnected(request, _whole(head, answers, choices, len(prompts)))
    return Response(status_code=499) if whole is None else json_response(whole)


def _refuse_unsupported(body: CompletionRequest) -> None:
    if body.suffix:
        raise bad_request("suffix: not supported", "suffix", "unsupported")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise bad_request("best_of: not supported beyond n", "best_of", "unsupported")
    if body.echo and body.logprobs is not None:
        raise bad_request("echo: the prompt's own logprobs are not computed; ask for one of the two", "echo")


def _text_of(tokenizer: Tokenizer, prompt: Prompt) -> str:
    """Of ids. Raises ApiError for those of the model's rows that no token has."""
    without = next((i for i in prompt.ids if i >= tokenizer.vocab_size), None)
    if without is not None:
        raise bad_request(f"prompt: echo needs ids that have a text; {without} has none", "prompt")
    return tokenizer.decode(prompt.ids)


class _Choice:
    """One continuation as it comes."""

    def __init__(self, served: Served, body: CompletionRequest, prompt: Prompt, index: int) -> None:
        tokenizer = served.generator.tokenizer
        self.index = index
        self._echo = (_text_of(tokenizer, prompt) if prompt.text is None else prompt.text) if body.echo else ""
        self._alternatives = bool(body.logprobs)
        self._log = None if body.logprobs is None else TokenLog(tokenizer, served.silent, prompt.ids[-1])

    def piece(self, chunk: Chunk) -> TextChoice:
        """What a stream says of this chunk, or of many joined."""
        text, self._echo = self._echo + chunk.text, ""
        reason: FinishReason | None = None if chunk.finish_reason is None else "stop"
        if chunk.finish_reason == "length":
            reason = "length"
        logprobs = None if self._log is None else self._log.legacy(chunk, alternatives=self._alternatives)
        return {"index": self.index, "text": text, "logprobs": logprobs, "finish_reason": reason}


async def _whole(head: Head, answers: Answers, choices: list[_Choice], prompts: int) -> TextCompletion:
    came: list[list[Chunk]] = [[] for _ in choices]
    async for number, chunk in answers:
        came[number].append(chunk)
    done = [choice.piece(_joined(chunks)) for choice, chunks in zip(choices, came, strict=True)]
    usage = answers.usage(prompts)
    return {**head.fields(), "object": "text_completion", "choices": done, "usage": usage}


async def _chunks(
    head: Head, answers: Answers, choices: list[_Choice], prompts: int, include_usage: bool
) -> AsyncIterator[TextCompletion]:
    async for number, chunk in answers:
        piece = choices[number].piece(chunk)
        made: TextCompletion = {**head.fields(), "object": "text_completion", "choices": [piece], "usage": None}
        if not include_usage:
            del made["usage"]
        yield made
    if include_usage:
        yield {**head.fields(), "object": "text_completion", "choices": [], "usage": answers.usage(prompts)}


def _joined(chunks: list[Chunk]) -> Chunk:
    return Chunk(
        "".join(chunk.text for chunk in chunks),
        [token for chunk in chunks for token in chunk.ids],
        [logprob for chunk in chunks for logprob in chunk.logprobs],
        chunks[-1].finish_reason,
        [top for chunk in chunks for top in chunk.top_logprobs],
    )
