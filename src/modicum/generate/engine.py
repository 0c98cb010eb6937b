"""Many callers, one model: a thread that decodes whatever was submitted, and gives each caller its own answer."""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch

from modicum.generate.answer import Chunk
from modicum.generate.choice import TokenMask
from modicum.generate.decoding import Decoding, Request
from modicum.generate.generator import Generator, evaluation_mode
from modicum.generate.params import SamplingParams
from modicum.generate.passes import check_memory
from modicum.generate.ticket import QueueFull, Ticket

_LOG = logging.getLogger("modicum.generate")


@dataclass(frozen=True)
class EngineNumbers:
    """How the engine stands, for monitoring. Those from `requests` on are totals since it was made.

    tokens_in: of prompts that got a slot, cached_in: those of them that a slot still held; tokens_out: sampled ones, as
    they come. prefix_hits: requests that found any of their prompt in a slot.
    """

    slots: int
    active: int
    queued: int
    requests: int
    finished: int
    cancelled: int
    failed: int
    rejected: int
    tokens_in: int
    cached_in: int
    tokens_out: int
    prefix_hits: int
    steps: int


class Engine:
    """Serves one generator's model from a thread of its own, up to `slots` requests at once, others in a queue.

    context: tokens of one slot, by default the model's. max_queue: requests that may wait. prefill_chunk: prompt tokens
    between two steps of those that are already answering. compiled: decode by the kernel that is made for this
    processor, or, where the caller put the model on another device, through torch.compile; without it nothing is made
    ready but what chooses tokens, and all is slower. spare_core: decode with one thread fewer while several are
    answering, for who hands the tokens out: the threads wait for each other some thirty times a step, and all of them
    for one whose core another program has.
    on_fault is called, in the engine's thread, when an error has ended it, on_first with the seconds from a
    request to its first token that is given out.
    All memory is taken here; UserError when there is not enough. Greedy answers of a float32 model do not depend on who
    else is answering: on a CPU with the kernel bit for bit, but for what is taken over from another prompt's pieces.
    """

    def __init__(
        self,
        generator: Generator,
        *,
        slots: int = 8,
        context: int | None = None,
        max_queue: int = 64,
        prefill_chunk: int = 256,
        compiled: bool = True,
        spare_core: bool = False,
    ) -> None:
        self._generator, self._max_queue = generator, max_queue
        self._context = min(context or generator.context, generator.context)
        check_memory(generator.model, slots, self._context, compiled=compiled)
        # a thread does not inherit the number that was set in another
        self._threads = torch.get_num_threads()
        self._decoding = Decoding(
            generator.model,
            generator.never,
            slots=slots,
            capacity=self._context,
            chunk=prefill_chunk,
            keep=True,
            compiled=compiled,
            crowd_threads=max(1, self._threads - 1) if spare_core else None,
        )
        # guards everything below, but for the decoding, which is the thread's own; never held while a caller is called
        self._changed = threading.Condition()
        self._queue: deque[Ticket] = deque()
        self._at_work: dict[Request, Ticket] = {}
        self._totals = Counter[str]()
        self._warm = self._closing = self._dropping = False
        self._fault: Exception | None = None
        self.on_fault: Callable[[], None] = lambda: None
        self.on_first: Callable[[float], None] = lambda _: None
        self._thread = threading.Thread(target=self._run, name="modicum-engine", daemon=True)

    @property
    def ready(self) -> bool:
        """Whether it answers: started, warm, neither closing nor broken."""
        return self._warm and not self._closing and self._fault is None

    @property
    def alive(self) -> bool:
        """Whether its thread is at work."""
        return self._thread.is_alive()

    @property
    def fault(self) -> Exception | None:
        """What ended the thread, where that was an error."""
        return self._fault

    def start(self) -> None:
        """Make everything warm, then serve, in the engine's thread; returns at once. What is submitted waits."""
        self._thread.start()

    @property
    def room(self) -> int:
        """Requests that it takes when it is idle: in slots and in the queue."""
        return self._decoding.slots + self._max_queue

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        mask: TokenMask | None = None,
        owner: int | None = None,
    ) -> Ticket:
        """Queue a request. owner: whose it is; it takes nothing over from the prompts of others. Raises QueueFull,
        UserError for a bad prompt, RuntimeError when closed or broken."""
        answer = self._generator.answer(prompt, params, context=self._context)
        ticket = Ticket(Request(answer, mask, owner), self._stir)
        with self._changed:
            if self._fault is not None:
                raise RuntimeError("the engine has failed") from self._fault
            if self._closing:
                raise RuntimeError("the engine is closed")
            if len(self._queue) + len(self._at_work) >= self.room:  # those that an idle slot will take do not wait
                self._totals["rejected"] += 1
                raise QueueFull(f"{self.room} requests are answered or wait already; try again later")
            self._totals["requests"] += 1
            self._queue.append(ticket)
            self._changed.notify_all()
        return ticket

    def close(self, *, drain_seconds: float = 0) -> None:
        """Take no more requests, give those that are in at most so many seconds, cancel the rest, end the thread. A
        thread that still makes things warm is not waited for and ends by itself: see `alive`."""
        with self._changed:
            self._closing = True
            if self._thread.is_alive():
                self._changed.wait_for(lambda: not self._queue and not self._at_work, drain_seconds)
            self._dropping = True
            warm = self._warm
            left = [] if warm else list(self._queue)
            if not warm:  # nobody takes them from there
                self._queue.clear()
            self._changed.notify_all()
        for ticket in left:
            ticket.request.answer.finish("cancelled")
            self._deliver(ticket)
        if warm:
            self._thread.join()

    def numbers(self) -> EngineNumbers:
        """How it stands now."""
        with self._changed:
            totals = {f.name: self._totals[f.name] for f in fields(EngineNumbers)[3:]}
            return EngineNumbers(self._decoding.slots, len(self._at_work), len(self._queue), **totals)

    def _stir(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        try:
            with evaluation_mode(self._generator.model):
                self._decoding.warm()
                with self._changed:
                    self._warm = True
                while self._turn():
                    pass
        except Exception as error:
            self._fail(error)

    def _turn(self) -> bool:
        """One round: clear out, let in, decode, deliver. False when it is closed and nobody waits."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._at_work or self._dropping)
            gone = [t for t in (*self._at_work.values(), *self._queue) if t.cancelled or self._dropping]
            self._queue = deque(ticket for ticket in self._queue if ticket not in gone)
            room = self._decoding.free + sum(ticket.request in self._at_work for ticket in gone)
            new = [self._queue.popleft() for _ in range(min(room, len(self._queue)))]
            self._at_work |= {ticket.request: ticket for ticket in new}
            self._totals["tokens_in"] += sum(ticket.prompt_tokens for ticket in new)
        for ticket in gone:
            self._decoding.remove(ticket.request)
            ticket.request.answer.finish("cancelled")
            self._deliver(ticket)
        for ticket in new:
            if ticket.request.answer.finish_reason is None:
                self._decoding.add(ticket.request)
            else:  # there is no room for a single token
                self._deliver(ticket)
        for request in self._decoding.step():
            self._deliver(self._at_work[request])
        with self._changed:
            self._totals["steps"] += 1
            self._changed.notify_all()
        return not self._dropping or bool(self._at_work)

    def _deliver(self, ticket: Ticket) -> None:
        """Give a ticket what is new, count it, and let it go when that was the last."""
        request = ticket.request
        piece = request.error or request.answer.chunk()
        reason = request.answer.finish_reason
        with self._changed:
            self._totals["tokens_out"] += len(request.answer.ids) - ticket.counted
            ticket.counted = len(request.answer.ids)
            if request.error is not None or reason is not None:
                self._at_work.pop(request, None)
                self._totals["failed" if request.error else "cancelled" if reason == "cancelled" else "finished"] += 1
                self._totals["cached_in"] += request.cached
                self._totals["prefix_hits"] += request.cached > 0
        if isinstance(piece, Chunk) and piece.ids and not ticket.begun:
            ticket.begun = True
            self.on_first(time.perf_counter() - ticket.asked)
        if piece is not None:
            ticket.deliver(piece)

    def _fail(self, error: Exception) -> None:
        _LOG.error("the engine has failed", exc_info=error)
        with self._changed:
            self._fault = error
            left = [*self._at_work.values(), *self._queue]
            self._at_work.clear()
            self._queue.clear()
            self._totals["failed"] += len(left)
            self._changed.notify_all()
        for ticket in left:
            fault = RuntimeError("the engine has failed")
            fault.__cause__ = error
            ticket.deliver(fault)
        self.on_fault()
