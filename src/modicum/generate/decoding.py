"""Requests decoded together: each owns a slot of one cache from its first token to its last, whoever comes and goes.

A step feeds prompts in pieces and gives every row whose prompt is read its next token. A prompt's pieces are cut by the
prompt alone and read alone, so what is computed for it does not depend on who shares the step, but for a beginning
that it takes over.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from modicum.generate.answer import Alternatives, Answer
from modicum.generate.choice import Chooser, TokenMask, choose
from modicum.generate.passes import ModelFault, Runtime, make_passes
from modicum.model import Decoder
from modicum.model.native import kernel_fault
from modicum.model.stepper import greedy

FEW = 2  # requests


class Request:
    """One answer on its way through a Decoding. `cached`: prompt tokens that were not computed again; they are of
    requests of the same owner."""

    def __init__(self, answer: Answer, mask: TokenMask | None = None, owner: int | None = None) -> None:
        self.answer, self.mask, self.owner = answer, mask, owner
        self.cached = 0
        self.error: Exception | None = None


@dataclass
class _Row:
    """A request in its slot. `read`: how many of `tokens` (prompt and answer) are in the cache. `finite`: whether all
    its logits were."""

    request: Request
    slot: int
    chooser: Chooser
    tokens: list[int]
    read: int
    finite: bool = True

    @property
    def waiting(self) -> int:
        """How many tokens are to be fed: 1, the newest, when the row gets its next token in this step."""
        return len(self.tokens) - self.read

    @property
    def begun(self) -> bool:
        """Whether any of its tokens was computed."""
        return self.read > self.request.cached


class Decoding:
    """`slots` requests at a time, of at most `capacity` tokens each, prompt and answer together.

    never: ids (int64) that must not be sampled. chunk: prompt tokens of one pass, and about so many of one step.
    keep: remember the tokens of requests that ended; what a prompt begins with and these hold, or those at work, is not
    computed again. Without it no request takes anything over from another.
    crowd_threads: of a step in which more than FEW requests get a token; None for as many as ever.
    """

    def __init__(
        self,
        model: Decoder | Runtime,
        never: Tensor,
        *,
        slots: int,
        capacity: int,
        chunk: int = 256,
        keep: bool = False,
        compiled: bool = False,
        crowd_threads: int | None = None,
    ) -> None:
        longest = max(chunk, slots)
        self._passes = make_passes(model, slots=slots, capacity=capacity, longest=longest, compiled=compiled)
        self._vocabulary, self._chunk = model.config.vocab_size, chunk
        # float64, which the draw needs, does not exist on Apple's GPUs
        device = self._passes.device
        # elsewhere another number of threads would only have a step compiled anew
        self._crowd_threads = crowd_threads if device.type == "cpu" else None
        self._sampling_device = torch.device("cpu") if device.type == "mps" else device
        if self._sampling_device.type == "cpu":
            kernel_fault()  # loads it, where there is one: it chooses tokens whoever computes the logits
        self._never = never.to(self._sampling_device)
        self._rows: list[_Row] = []
        self._keep, self._oldest_first = keep, False
        # the slots without a request, the one that was free longest first, the tokens that each still holds, and whose
        self._free: deque[int] = deque(range(slots))
        self._held: list[list[int]] = [[] for _ in range(slots)]
        self._owners: list[int | None] = [None] * slots

    @property
    def slots(self) -> int:
        """How many requests can have one at once."""
        return self._passes.slots

    @property
    def capacity(self) -> int:
        """How many tokens a request can have, prompt and answer together."""
        return self._passes.capacity

    @property
    def free(self) -> int:
        """How many requests can be added now."""
        return len(self._free)

    @property
    def active(self) -> int:
        """How many requests have a slot."""
        return len(self._rows)

    def add(self, request: Request) -> None:
        """Give it a slot. IndexError when there is none."""
        prompt = request.answer.prompt
        chooser = Chooser(request.answer.params, prompt, self._vocabulary, self._sampling_device, request.mask)
        slot, request.cached = self._place(prompt, request.owner)
        self._owners[slot] = request.owner
        self._rows.append(_Row(request, slot, chooser, list(prompt), request.cached))

    def remove(self, request: Request) -> None:
        """Free its slot; nothing happens when it has none."""
        for row in [row for row in self._rows if row.request is request]:
            self._rows.remove(row)
            if not row.finite:  # it would reach the next request of this slot, and those that take it over
                self._passes.clear(row.slot)
            self._held[row.slot] = row.tokens[: row.read] if self._keep and request.error is None else []
            self._free.append(row.slot)

    @torch.inference_mode()
    def warm(self) -> None:
        """Have everything made that the first request would wait for."""
        self._passes.warm()

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """One token more for every request whose prompt is read; returns those that got one or failed.

        What ended has left its slot. A request fails alone: by its mask, or by logits that are not finite (ModelFault).
        """
        read = self._read_prompts()
        rows = [row for row in self._rows if row.waiting == 1]
        logits = [logits_1V for _, logits_1V in read]
        with _on_threads(self._crowd_threads if len(rows) > FEW else None):
            if rows:
                logits.append(self._advance(rows))
            rows = [row for row, _ in read] + rows
            if not rows:
                return []
            self._sample(rows, (logits[0] if len(logits) == 1 else torch.cat(logits)).to(self._sampling_device))
        for row in rows:
            if row.request.error is not None or row.request.answer.finish_reason is not None:
                self.remove(row.request)
        return [row.request for row in rows]

    def _read_prompts(self) -> list[tuple[_Row, Tensor]]:
        """A piece of each of some prompts; the rows whose last one that was, with the logits after it, (1, V).

        Short prompts do not wait for a long one: who has least left comes first. Every other time it is who came first,
        or a long one would wait for ever while short ones keep coming.
        """
        rows = [row for row in self._rows if row.waiting > 1 and not self._gains_by_waiting(row)]
        oldest = rows[0] if rows and self._oldest_first else None
        self._oldest_first = not self._oldest_first
        read, budget = [], self._chunk
        for row in sorted(rows, key=lambda row: (row is not oldest, row.waiting)):
            if budget <= 0:
                break
            if self._keep and not row.begun:
                self._take_over(row)
            if row.waiting == 1:  # it gets its token beside the others
                continue
            budget -= min(row.waiting, self._chunk)
            logits_1V = self._read_prompt(row)
            if logits_1V is not None:
                read.append((row, logits_1V))
        return read

    def _gains_by_waiting(self, row: _Row) -> bool:
        """Whether more of what this prompt begins with is just being read, for another of its owner's. Who has begun
        waits for nobody, so somebody always goes on."""
        if not self._keep or row.begun:
            return False
        for other in self._rows:
            if other.begun and other.waiting > 1 and other.request.owner == row.request.owner:
                more = max(other.read, row.read) + 1
                if more < len(row.tokens) and other.tokens[:more] == row.tokens[:more]:
                    return True
        return False

    def _take_over(self, row: _Row) -> None:
        """Into its slot, what others have read since the row came, and its prompt begins with."""
        best, length = self._nearest(row.tokens, row.request.owner)
        if length > row.read:
            self._passes.copy(best, row.slot, length)
            row.read = row.request.cached = length

    def _read_prompt(self, row: _Row) -> Tensor | None:
        """The next piece of a prompt; the logits after it, (1, V), where it is the last."""
        piece, start = row.tokens[row.read : row.read + self._chunk], row.read
        row.read += len(piece)
        return self._passes.read(piece, row.slot, start, last=not row.waiting)

    def _advance(self, rows: Sequence[_Row]) -> Tensor:
        """Logits (R, V) after the newest token of each row."""
        places = [row.read for row in rows]
        for row in rows:
            row.read += 1
        return self._passes.step([row.tokens[-1] for row in rows], [row.slot for row in rows], places)

    def _sample(self, rows: Sequence[_Row], logits_RV: Tensor) -> None:
        tokens_R, logprobs_R, totals_R = greedy(logits_RV, self._never)
        failed: dict[int, Exception] = {}
        if not all(row.chooser.plain for row in rows):
            tokens_R, failed = choose(logits_RV, [row.chooser for row in rows], self._never)
            logprobs_R = logits_RV.gather(-1, tokens_R[:, None])[:, 0] - totals_R
        logprobs = logprobs_R.tolist()
        alternatives = _alternatives(logits_RV, totals_R, [row.request.answer.params.top_logprobs for row in rows])
        for i, (row, token) in enumerate(zip(rows, tokens_R.tolist(), strict=True)):
            row.request.error = failed.get(i)
            # one NaN or infinity among the logits makes the total such
            row.finite = math.isfinite(logprobs[i])
            if not row.finite and row.request.error is None:
                row.request.error = ModelFault(
                    "the model's logits are not finite: its weights are damaged or overflow in this dtype; try "
                    "float32, or another checkpoint"
                )
            if row.request.error is None:
                self._take(row, token, logprobs[i], alternatives.get(i))

    def _take(self, row: _Row, token: int, logprob: float, alternatives: Alternatives | None) -> None:
        answer = row.request.answer
        row.tokens.append(token)
        try:
            row.chooser.take(token, ends=answer.is_stop(token))
            complete = row.request.mask is not None and row.request.mask.finished()
        except Exception as error:  # whatever a caller's mask raises is that caller's
            row.request.error = error
            return
        answer.take(token, logprob, alternatives, complete=complete)

    def _place(self, prompt: list[int], owner: int | None) -> tuple[int, int]:
        """A free slot for this prompt, and how many of its tokens the slot holds already.

        Tokens come from the nearest slot; an idle one is taken over, unless that would lose more than it saves.
        """
        if not self._keep:
            return self._free.popleft(), 0
        best, length = self._nearest(prompt, owner)
        if best in self._free and 2 * length >= len(self._held[best]):
            self._free.remove(best)
            return best, length
        slot = self._free.popleft()
        if length and slot != best:
            self._passes.copy(best, slot, length)
        return slot, length

    def _nearest(self, prompt: list[int], owner: int | None) -> tuple[int, int]:
        """The owner's slot, idle or at work, that holds most of what the prompt begins with, and how many tokens.

        The prompt's last token does not count: it is always computed, since its logits are wanted.
        """
        tokens = list(self._held)
        for row in self._rows:
            tokens[row.slot] = row.tokens[: row.read]
        own = [whose == owner for whose in self._owners]
        shared = [_shared(held, prompt[:-1]) if mine else 0 for mine, held in zip(own, tokens, strict=True)]
        best = max(range(len(shared)), key=shared.__getitem__)
        return best, shared[best]


@contextmanager
def _on_threads(count: int | None) -> Iterator[None]:
    """Inside, PyTorch has so many threads; as many as before where None."""
    before = torch.get_num_threads()
    if count is None or count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _shared(held: Sequence[int], prompt: Sequence[int]) -> int:
    """How many tokens both begin with."""
    for i, (a, b) in enumerate(zip(held, prompt, strict=False)):
        if a != b:
            return i
    return min(len(held), len(prompt))


def _alternatives(logits_RV: Tensor, totals_R: Tensor, asked: Sequence[int]) -> dict[int, Alternatives]:
    """For each row that asks for them the most probable ids and their logprobs, best first."""
    rows = [row for row, count in enumerate(asked) if count]
    if not rows:
        return {}
    most = min(max(asked), logits_RV.shape[-1])
    values, ids = (logits_RV[rows] - totals_R[rows, None]).topk(most)
    pairs = [list(zip(i, v, strict=True)) for i, v in zip(ids.tolist(), values.tolist(), strict=True)]
    return {row: found[: asked[row]] for row, found in zip(rows, pairs, strict=True)}
