"""Users of a server: requests sent over HTTP, and the moments at which the pieces of their answers come.

The same code asks every system: greedy completions of token ids, streamed, of a length that is known before.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from modicum.bench.serving_load import Asked


@dataclass
class Answered:
    """due: when it was to be sent; pieces: when each piece of text came (none, where no token is a character's end);
    ended: when all had; seconds of one clock. tokens: as the server's usage counts them. fault: what went wrong."""

    due: float
    pieces: list[float] = field(default_factory=list)
    ended: float = 0.0
    tokens: int = 0
    fault: str | None = None


@dataclass(frozen=True)
class Target:
    """Where requests go. ends: ids that end an answer, which no answer may then hold."""

    address: str
    model: str
    ends: Sequence[int]

    def body(self, asked: Asked) -> dict[str, Any]:
        """What is sent. Both ways of going on past an end: llama.cpp knows the one, every OpenAI server the other."""
        return {
            "model": self.model,
            "prompt": asked.prompt,
            "max_tokens": asked.tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "logit_bias": {str(number): -100 for number in self.ends},
        }


async def run_users(target: Target, requests: Sequence[Asked], users: int) -> list[Answered]:
    """All requests, by so many users, each of whom sends the next one when the last is answered."""
    waiting, answers = iter(requests), list[Answered]()

    async def user(session: aiohttp.ClientSession) -> None:
        for asked in waiting:
            answers.append(await _ask(session, target, asked, time.perf_counter()))

    async with _session() as session, asyncio.TaskGroup() as group:
        for _ in range(users):
            group.create_task(user(session))
    return answers


async def run_arrivals(target: Target, requests: Sequence[Asked]) -> list[Answered]:
    """All requests, each at its own moment. What is measured begins there, even where it was sent a little later."""
    start, answers = time.perf_counter(), list[Answered]()

    async def one(session: aiohttp.ClientSession, asked: Asked) -> None:
        due = start + asked.at
        await asyncio.sleep(due - time.perf_counter())
        answers.append(await _ask(session, target, asked, due))

    async with _session() as session, asyncio.TaskGroup() as group:
        for asked in requests:
            group.create_task(one(session, asked))
    return answers


def _session() -> aiohttp.ClientSession:
    """A connection for each request: one that is kept may be closed by the server just when it is used again."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))


async def _ask(session: aiohttp.ClientSession, target: Target, asked: Asked, due: float) -> Answered:
    answer = Answered(due)
    try:
        async with session.post(f"{target.address}/v1/completions", json=target.body(asked)) as response:
            if response.status == 200:
                await _read(response, answer)
            else:
                answer.fault = f"status {response.status}: {_message(await response.read())}"
    except (aiohttp.ClientError, OSError, ValueError) as error:
        answer.fault = f"{type(error).__name__}: {error}"
    answer.ended = time.perf_counter()
    if answer.fault is None and answer.tokens != asked.tokens:
        answer.fault = "an answer that is shorter than was asked for, or has no usage"
    return answer


async def _read(response: aiohttp.ClientResponse, answer: Answered) -> None:
    """The events of a stream, as they come."""
    async for line in response.content:
        now = time.perf_counter()
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        event = orjson.loads(line[6:])
        if "error" in event:
            answer.fault = f"inside a stream: {_message(line[6:])}"
            return
        if any(choice.get("text") for choice in event.get("choices", ())):
            answer.pieces.append(now)
        usage: Mapping[str, int] | None = event.get("usage")
        if usage:
            answer.tokens = usage["completion_tokens"]


def _message(body: bytes) -> str:
    """What an error says, in OpenAI's shape or in none."""
    try:
        message = orjson.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = body.decode("utf-8", "replace")
    return " ".join(str(message).split())[:200]
