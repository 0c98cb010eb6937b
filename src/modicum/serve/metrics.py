"""GET /metrics: counts and times in Prometheus' text format."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from modicum.generate import EngineNumbers

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
# how the engine's numbers are called, and what they are
_ENGINE = {
    "slots": ("slots", "gauge", "Requests that can be answered at once"),
    "active": ("active_requests", "gauge", "Requests being answered"),
    "queued": ("queued_requests", "gauge", "Requests waiting for a slot"),
    "requests": ("engine_requests_total", "counter", "Answers asked of the engine"),
    "finished": ("engine_finished_total", "counter", "Answers that came to their end"),
    "cancelled": ("engine_cancelled_total", "counter", "Answers that nobody waited for any more"),
    "failed": ("engine_failed_total", "counter", "Answers that an error ended"),
    "rejected": ("engine_rejected_total", "counter", "Requests refused by a full queue"),
    "tokens_in": ("prompt_tokens_total", "counter", "Tokens of prompts that got a slot"),
    "cached_in": ("cached_prompt_tokens_total", "counter", "Tokens of prompts that were not computed again"),
    "tokens_out": ("generated_tokens_total", "counter", "Tokens sampled"),
    "prefix_hits": ("prefix_hits_total", "counter", "Answers whose prompt began like one before"),
    "steps": ("steps_total", "counter", "Steps of the engine"),
}


class Histogram:
    """Seconds in buckets."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_SECONDS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        """One more."""
        self._counts[sum(seconds > bound for bound in _SECONDS)] += 1
        self._sum += seconds

    def lines(self, name: str, text: str) -> Iterator[str]:
        """Its lines of the page."""
        yield from _head(name, "histogram", text)
        below = 0
        for bound, count in zip((*_SECONDS, "+Inf"), self._counts, strict=True):
            below += count
            yield f'modicum_{name}_bucket{{le="{bound}"}} {below}'
        yield f"modicum_{name}_sum {self._sum:.6f}"
        yield f"modicum_{name}_count {below}"


class Metrics:
    """What the server counts of its own requests. Wraps the application: an ASGI middleware.

    first_token: seconds that the engine took to the first token of each answer.
    """

    def __init__(self) -> None:
        self._app: ASGIApp | None = None
        self._responses = Counter[tuple[str, int]]()
        self.first_token, self._whole = Histogram(), Histogram()

    def around(self, app: ASGIApp) -> "Metrics":
        """`app`, counted."""
        self._app = app
        return self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self._app is not None
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = time.perf_counter()

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._responses[_route(scope), message["status"]] += 1
            await send(message)

        try:
            await self._app(scope, receive, counted)
        finally:
            if scope["method"] == "POST" and _route(scope).startswith("/v1/"):
                self._whole.observe(time.perf_counter() - begun)

    def page(self, numbers: EngineNumbers | None) -> str:
        """All of it. numbers: None before there is an engine."""
        lines = [*_head("http_responses_total", "counter", "Responses by route and status")]
        for (route, status), count in sorted(self._responses.items()):
            lines.append(f'modicum_http_responses_total{{route="{route}",status="{status}"}} {count}')
        lines += self.first_token.lines("time_to_first_token_seconds", "From the queue to an answer's first token")
        lines += self._whole.lines("request_seconds", "Time of a whole completion request")
        for field, value in asdict(numbers).items() if numbers is not None else ():
            name, kind, text = _ENGINE[field]
            lines += [*_head(name, kind, text), f"modicum_{name} {value}"]
        return "\n".join(lines) + "\n"


def _route(scope: Scope) -> str:
    """The route's path, not the client's, or anyone could make as many series as he likes."""
    return str(getattr(scope.get("route"), "path", "other"))


def _head(name: str, kind: str, text: str) -> Iterable[str]:
    return f"# HELP modicum_{name} {text}", f"# TYPE modicum_{name} {kind}"
