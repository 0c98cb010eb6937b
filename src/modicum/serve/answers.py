"""Answers of the engine on their way to one client: from its thread into the event loop, and no longer than wanted."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from modicum.generate import Chunk, Ticket
from modicum.serve.errors import from_exception, shutting_down
from modicum.serve.responses import Usage

T = TypeVar("T")


class Answers:
    """The answers to one HTTP request. Iterating gives (number, chunk) in the order in which they come.

    seconds: how long they may take; then what was not finished ends with finish_reason "length".
    """

    def __init__(self, tickets: Sequence[Ticket], *, seconds: float) -> None:
        self.tickets = list(tickets)
        self._tokens = 0
        loop = asyncio.get_running_loop()
        self._deadline = loop.time() + seconds
        self._came: asyncio.Queue[tuple[int, Chunk | Exception]] = asyncio.Queue()
        for number, ticket in enumerate(self.tickets):
            ticket.subscribe(self._deliver_to(loop, number))

    def _deliver_to(self, loop: asyncio.AbstractEventLoop, number: int) -> Callable[[Chunk | Exception], None]:
        def deliver(piece: Chunk | Exception) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._came.put_nowait, (number, piece))

        return deliver

    async def __aiter__(self) -> AsyncIterator[tuple[int, Chunk]]:
        """Raises what ended an answer, and ApiError 503 when the server ends; no answer goes on after that."""
        open_ones = set(range(len(self.tickets)))
        try:
            while open_ones:
                try:
                    async with asyncio.timeout_at(self._deadline):
                        number, piece = await self._came.get()
                except TimeoutError:
                    for number in sorted(open_ones):
                        yield number, Chunk("", [], [], "length")
                    return
                if isinstance(piece, Exception):
                    raise piece
                if piece.finish_reason == "cancelled":
                    raise shutting_down()
                self._tokens += len(piece.ids)
                if piece.finish_reason is not None:
                    open_ones.discard(number)
                yield number, piece
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Free the slots; what is finished already is not touched by it."""
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
    """Server-sent events. Whatever ends the response, `answers` go on no longer than it."""

    def __init__(self, events: AsyncIterator[Mapping[str, Any]], answers: Answers) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(_lines(events), media_type="text/event-stream", headers=headers)
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
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
