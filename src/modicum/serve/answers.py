"""Answers of the engine on their way to one client: from its thread into the event loop, and no longer than wanted."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from modicum.generate import Chunk, Ticket
from modicum.serve.errors import busy, from_exception, shutting_down
from modicum.serve.limits import Limits
from modicum.serve.responses import Usage

T = TypeVar("T")
# Seconds for the last bytes of what was answered to go out, to a reader that is slow.
LAST_WORDS = 5


class Answers:
    """The answers to one HTTP request. Iterating gives (number, chunk) in the order in which they come.

    deadline: when, by the event loop's clock, they have taken as long as `limits` allow: what was not finished then
    ends with finish_reason "length".
    """

    def __init__(self, tickets: Sequence[Ticket], limits: Limits) -> None:
        self.tickets, self._limits = list(tickets), limits
        self._tokens = 0
        loop = asyncio.get_running_loop()
        self.deadline = loop.time() + limits.seconds
        self._late = False
        self._timer = loop.call_at(self.deadline, self._cut)
        self._came: asyncio.Queue[tuple[int, Chunk | Exception]] = asyncio.Queue()
        for number, ticket in enumerate(self.tickets):
            ticket.subscribe(self._deliver_to(loop, number))

    def _deliver_to(self, loop: asyncio.AbstractEventLoop, number: int) -> Callable[[Chunk | Exception], None]:
        def deliver(piece: Chunk | Exception) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._came.put_nowait, (number, piece))

        return deliver

    def _cut(self) -> None:
        """Time is up: what the engine still gives of each is the last that comes of it."""
        self._late = True
        self.cancel()

    async def __aiter__(self) -> AsyncIterator[tuple[int, Chunk]]:
        """Raises what ended an answer, and ApiError 503 when the server ends or when time was up before any of them had
        its first token; no answer goes on after that."""
        open_ones = set(range(len(self.tickets)))
        try:
            while open_ones:
                try:
                    async with asyncio.timeout_at(self.deadline + LAST_WORDS):
                        number, piece = await self._came.get()
                except TimeoutError:  # the engine is held up within a step
                    number, piece = min(open_ones), Chunk("", [], [], "cancelled")
                if isinstance(piece, Exception):
                    raise piece
                self._tokens += len(piece.ids)
                if piece.finish_reason == "cancelled":
                    piece = self._cut_short(piece)
                if piece.finish_reason is not None:
                    open_ones.discard(number)
                yield number, piece
        finally:
            self.cancel()

    def _cut_short(self, last: Chunk) -> Chunk:
        """The last chunk of an answer that did not come to its end."""
        if not self._late:
            raise shutting_down()
        if not self._tokens:
            message = f"the server is too busy: no token came within {self._limits.seconds:g} seconds"
            raise busy(message, retry_seconds=self._limits.retry_seconds)
        return replace(last, finish_reason="length")

    def cancel(self) -> None:
        """Free the slots; what is finished already is not touched by it."""
        self._timer.cancel()
        for ticket in self.tickets:
            ticket.cancel()

    def usage(self, prompts: int = 1) -> Usage:
        """Tokens so far. prompts: how many different ones there are; the `n` answers to one count it once."""
        each = len(self.tickets) // prompts
        read = sum(ticket.prompt_tokens for ticket in self.tickets[::each])
        cached = sum(ticket.cached_tokens for ticket in self.tickets[::each])
        return {
            "prompt_tokens": read,
            "completion_tokens": self._tokens,
            "total_tokens": read + self._tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


async def unless_disconnected(request: Request, work: Awaitable[T]) -> T | None:
    """What `work` gives, or None when the client goes away first; then it is cancelled."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.wait((working, watching))


class EventStream(StreamingResponse):
    """Server-sent events. Whatever ends the response, `answers` go on no longer than it; it lasts no longer than they
    may, whether or not anybody reads."""

    def __init__(self, events: AsyncIterator[Mapping[str, Any]], answers: Answers) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(_lines(events), media_type="text/event-stream", headers=headers)
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(TimeoutError):  # a response without its end closes the connection
                async with asyncio.timeout_at(self._answers.deadline + LAST_WORDS):
                    await super().__call__(scope, receive, send)
        finally:
            self._answers.cancel()


async def _lines(events: AsyncIterator[Mapping[str, Any]]) -> AsyncIterator[str]:
    """Each event as `data: ...`; a failure is one more, since the status has been sent; `[DONE]` at the end."""
    try:
        async for event in events:
            yield f"data: {json.dumps(event, allow_nan=False)}\n\n"
    except Exception as error:
        yield f"data: {json.dumps(from_exception(error).body())}\n\n"
    yield "data: [DONE]\n\n"
