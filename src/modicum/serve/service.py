"""What is served: one model behind its engine, loaded while the server already tells that it is not ready."""

import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from modicum.generate import Engine, Generator, QueueFull, SamplingParams, Ticket
from modicum.serve.background import Background
from modicum.serve.constrain import GrammarMask, Grammars
from modicum.serve.errors import LOG, ApiError, busy, shutting_down
from modicum.serve.limits import Limits
from modicum.serve.prompts import Prompt
from modicum.serve.requests import Sampling
from modicum.serve.tools import writes_tools

T = TypeVar("T")


@dataclass
class Served:
    """A model that answers. name: what requests call it; it holds no path.

    limits: of one request, whose choices are no more than the engine ever takes. grammars, tools: what it can be held
    to, and whether its template knows tools. silent: ids that are no text.
    """

    name: str
    generator: Generator
    engine: Engine
    limits: Limits
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        rows = self.generator.model.config.vocab_size
        # more would be told to come back for ever
        self.limits = replace(self.limits, choices=min(self.limits.choices, self.engine.room))
        self.grammars = Grammars(self.generator.tokenizer, rows, self.generator.stop_ids, self.limits)
        tokenizer = self.generator.tokenizer
        self.silent = frozenset(tokenizer.special_ids - tokenizer.spoken_ids) | self.generator.stop_ids
        self.tools = self.grammars.knows_tool_markers and writes_tools(self.generator.tokenizer)

    def submit(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        masks: Sequence[GrammarMask | None],
        owner: int | None,
    ) -> list[Ticket]:
        """One ticket for each prompt and each of its answers, all or none. owner: as Engine has it. Raises ApiError 503
        when the queue is full."""
        tickets: list[Ticket] = []
        try:
            for number, prompt in enumerate(prompts):
                for place, each in enumerate(params):
                    mask = masks[number * len(params) + place]
                    tickets.append(self.engine.submit(prompt.ids, each, mask=mask, owner=owner))
        except BaseException as error:
            for ticket in tickets:
                ticket.cancel()
            if isinstance(error, QueueFull):
                raise busy("too many requests are waiting", retry_seconds=self.limits.retry_seconds) from None
            if isinstance(error, RuntimeError) and not self.engine.ready:
                raise shutting_down() if self.engine.fault is None else _unavailable("has failed") from error
            raise
        return tickets


class Service:
    """Loads what is served in a thread, and keeps it for the requests. load: makes the model and its engine.

    on_fault is called when that fails, or the engine later; `fault` holds why. on_first: as the engine has it.
    log_prompts: whether the log holds what is asked.
    """

    def __init__(self, load: Callable[[], Served], limits: Limits, *, log_prompts: bool = False) -> None:
        self._load, self.limits, self._log_prompts = load, limits, log_prompts
        self._served: Served | None = None
        self._closing = False
        self.fault: Exception | None = None
        self.on_fault: Callable[[], None] = lambda: None
        self.on_first: Callable[[float], None] = lambda _: None
        self._background, self._preparers = Background(), Background()

    async def start(self) -> None:
        """Load; returns when it is done. A fault is kept, since nobody waits for this."""
        try:
            served = await self._background.run(self._load)
            if self._closing:  # nobody waits for it any more
                return
            served.engine.on_fault = partial(self._engine_failed, served.engine)
            served.engine.on_first = self.on_first
            served.engine.start()
        except Exception as error:
            self.fault = error
            self.on_fault()
        else:
            self._served = served

    def _engine_failed(self, engine: Engine) -> None:
        self.fault = engine.fault
        self.on_fault()

    async def close(self, *, drain_seconds: float = 0) -> None:
        """Take no more requests, and end the engine; what it still does gets so many seconds."""
        self._closing = True
        if self._served is not None:
            await self._background.run(partial(self._served.engine.close, drain_seconds=drain_seconds))

    @property
    def busy(self) -> bool:
        """Whether a thread is still at work: loading, warming, preparing, decoding, closing."""
        served = self._served
        if served is not None and (served.engine.alive or served.grammars.compiling):
            return True
        return self._background.at_work + self._preparers.at_work > 0

    @property
    def served(self) -> Served | None:
        """The model once it is loaded, warm or not."""
        return self._served

    @property
    def state(self) -> Literal["ok", "loading", "failed", "draining"]:
        """Whether it answers; draining: it is told to end, and only what it has begun is still answered."""
        engine = None if self._served is None else self._served.engine
        if self.fault is not None or (engine is not None and engine.fault is not None):
            return "failed"
        if self._closing:
            return "draining"
        return "ok" if engine is not None and engine.ready else "loading"

    def ready(self, name: str | None = None) -> Served:
        """The model of this name. Raises ApiError 503 while it is loading or the server ends, 404 for another name."""
        served, state = self._served, self.state
        if state == "draining":
            raise shutting_down()
        if served is None or state != "ok":
            raise _unavailable("has failed" if state == "failed" else "is loading")
        if name is not None and name != served.name:
            message = f"the model {name[:100]!a} is not served here; /v1/models lists what is"
            raise ApiError(404, message, param="model", code="model_not_found")
        return served

    def note(self, request: Sampling) -> None:
        """Write a request to the log, where that was asked for."""
        if self._log_prompts:
            LOG.info("asked: %s", json.dumps(request.model_dump(exclude_none=True, by_alias=True)))

    async def prepare(self, work: Callable[[], T]) -> T:
        """`work()` in a thread: making a prompt may take a while. Raises ApiError 503 when as many others do as the
        engine has room for: more cost memory, and would be turned away there. Work that nobody waits for any more
        counts until it ends."""
        if self._served is None or self._preparers.at_work >= self._served.engine.room:
            raise busy("too many requests are being prepared", retry_seconds=self.limits.retry_seconds)
        return await self._preparers.run(work)


def _unavailable(what: str) -> ApiError:
    return ApiError(503, f"the model {what}", code="unavailable", headers={"Retry-After": "2"})


def model_name(checkpoint: Path) -> str:
    """What a checkpoint is called: quickstart-sft for runs/quickstart/sft/checkpoints/last, else as its folder is, or
    its GGUF file."""
    path = checkpoint.absolute()
    path = path.with_suffix("") if path.suffix == ".gguf" else path
    parts = path.parts
    name = "-".join(parts[-4:-2]) if len(parts) > 4 and parts[-2] == "checkpoints" else path.name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-") or "model"
