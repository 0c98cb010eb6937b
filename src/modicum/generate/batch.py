"""Prompts decoded together: left padding, one cache, one token a row and step. What a token means is the engine's."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from modicum.generate.params import SamplingParams
from modicum.generate.sampler import draw, penalize_repetition, probabilities
from modicum.model import Decoder, KVCache
from modicum.store import UserError

# From so many tokens on, a transposed copy of the head's table (10 ms for 16,384 x 256) has paid for itself.
_WORTH_A_COPY = 16


@dataclass
class _Row:
    """`padding`: slots before the prompt. `left`: tokens it may still get; at 0 the row is finished."""

    number: int
    params: SamplingParams
    random: random.Random
    padding: int
    left: int


class Batch:
    """Rows of one left-padded batch. `step` gives each live row its next token; `retire` ends a row.

    prompts: token ids, none empty. limits: how many tokens each row may get at most, at least 1, and never more than
    the context has room for after the prompt. never: ids (int64) that must not be sampled.
    A row's tokens depend on its prompt, parameters and seed alone: padding is masked, and its random numbers come from
    its own `random.Random`, whose sequence Python keeps from version to version.
    """

    def __init__(
        self,
        model: Decoder,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        limits: Sequence[int],
        never: Tensor,
    ) -> None:
        weight = model.model.embed_tokens.weight
        self._model, self._device, self._dtype = model, weight.device, weight.dtype
        self._context = model.config.max_position_embeddings
        # float64, which the draw needs, does not exist on Apple's GPUs
        self._sampling_device = torch.device("cpu") if weight.device.type == "mps" else weight.device
        self._never = never.to(self._sampling_device)
        self._head = _fast_head(model) if max(limits) >= _WORTH_A_COPY else model.head
        longest = max(map(len, prompts))
        self._rows = [
            _Row(number, p, random.Random(p.seed), longest - len(prompt), limit)
            for number, (prompt, p, limit) in enumerate(zip(prompts, params, limits, strict=True))
        ]
        padded = [[0] * row.padding + list(prompt) for row, prompt in zip(self._rows, prompts, strict=True)]
        self._input_BT = torch.tensor(padded, dtype=torch.int64, device=self._device)
        self._seen_BV = self._ids_seen(prompts)
        self._cache: KVCache | None = None
        self._arrange()

    @property
    def live(self) -> bool:
        """Whether any row still gets tokens."""
        return any(row.left for row in self._rows)

    def retire(self, number: int) -> None:
        """The row of this prompt is finished; `step` gives it no more tokens."""
        for row in self._rows:
            if row.number == number:
                row.left = 0

    @torch.inference_mode()
    def step(self) -> list[tuple[int, int, float]]:
        """(prompt's number, token id, log-probability) for each live row; a row that reaches its limit here retires.

        The log-probability (nats) is the model's own, before penalty, temperature and filters. Raises UserError when
        the model's logits are not finite.
        """
        logits_BV = self._forward().to(self._sampling_device, torch.float32)
        logprobs_BV = logits_BV.log_softmax(-1)
        # one NaN or infinity makes the whole row NaN
        if logprobs_BV[:, 0].isnan().any():
            raise UserError(
                "the model's logits are not finite: its weights are damaged or overflow in this dtype; try float32, or "
                "another checkpoint"
            )
        if self._seen_BV is not None:
            logits_BV = penalize_repetition(logits_BV, self._seen_BV, self._penalty_B1)
        tokens_B = self._choose(logits_BV.index_fill_(-1, self._never, -torch.inf))
        if self._seen_BV is not None:
            self._seen_BV.scatter_(-1, tokens_B[:, None], True)
        self._input_BT = tokens_B[:, None].to(self._device)
        chosen = logprobs_BV.gather(-1, tokens_B[:, None])[:, 0].tolist()
        taken = []
        for row, token, logprob in zip(self._rows, tokens_B.tolist(), chosen, strict=True):
            if row.left:
                row.left -= 1
                taken.append((row.number, token, logprob))
        return taken

    def _forward(self) -> Tensor:
        """Logits (B, V) after the newest token of each row."""
        if self._cache is None:
            hidden_BTD = self._prefill()
        else:
            live = sum(row.left > 0 for row in self._rows)
            if self._cache.length == self._cache.capacity or 2 * live <= len(self._rows):
                self._cache = self._compact(self._cache)
            hidden_BTD = self._model.hidden(self._input_BT, cache=self._cache)
        return self._head(hidden_BTD[:, -1])

    def _prefill(self) -> Tensor:
        batch, longest = self._input_BT.shape
        # the last token of a row is never fed
        self._cache = self._new_cache(batch, longest + max(row.left for row in self._rows) - 1)
        keep_BT = None
        if any(row.padding for row in self._rows):
            padding_B1 = torch.tensor([[row.padding] for row in self._rows], device=self._device)
            keep_BT = torch.arange(longest, device=self._device) >= padding_B1
        return self._model.hidden(self._input_BT, attention_mask=keep_BT, cache=self._cache)

    def _new_cache(self, batch: int, capacity: int) -> KVCache:
        capacity = min(capacity, self._context)
        return KVCache(self._model.config, batch, capacity, dtype=self._dtype, device=self._device)

    def _compact(self, old: KVCache) -> KVCache:
        """Drop finished rows, and the padding that the others share, from all that is kept for a row.

        When the cache is as long as the context, a row without padding is finished: so this always makes room.
        """
        keep = [i for i, row in enumerate(self._rows) if row.left]
        index = torch.tensor(keep, device=self._device)
        self._rows = [self._rows[i] for i in keep]
        start = min(row.padding for row in self._rows)
        for row in self._rows:
            row.padding -= start
        self._input_BT = self._input_BT[index]
        if self._seen_BV is not None:
            self._seen_BV = self._seen_BV[index.to(self._sampling_device)]
        self._arrange()
        length = old.length - start
        new = self._new_cache(len(keep), length + max(row.left for row in self._rows))
        for source, target in zip((*old.keys, *old.values), (*new.keys, *new.values), strict=True):
            target[:, :, :length] = source[index, :, start : old.length]
        new.keep[:, :length] = old.keep[index, start : old.length]
        new.length, new.has_padding = length, any(row.padding for row in self._rows)
        return new

    def _arrange(self) -> None:
        """Group rows by the filters they share, so that each group is one call of the sampler."""
        groups: dict[tuple[float, int, float, float] | None, list[int]] = {}
        for i, row in enumerate(self._rows):
            p = row.params
            groups.setdefault(None if p.greedy else (p.temperature, p.top_k, p.top_p, p.min_p), []).append(i)
        self._groups = list(groups.items())
        penalties = [[row.params.repetition_penalty] for row in self._rows]
        self._penalty_B1 = torch.tensor(penalties, dtype=torch.float32, device=self._sampling_device)

    def _ids_seen(self, prompts: Sequence[Sequence[int]]) -> Tensor | None:
        """Which ids each prompt holds, (B, V) bool; None when no row has a penalty."""
        if all(row.params.repetition_penalty == 1 for row in self._rows):
            return None
        seen_BV = torch.zeros(len(prompts), self._model.config.vocab_size, dtype=torch.bool)
        for row, prompt in enumerate(prompts):
            seen_BV[row, list(prompt)] = True
        return seen_BV.to(self._sampling_device)

    def _choose(self, logits_BV: Tensor) -> Tensor:
        """One token id a row, (B,) int64."""
        tokens_B = torch.empty(len(self._rows), dtype=torch.int64, device=logits_BV.device)
        for filters, rows in self._groups:
            part = logits_BV if len(self._groups) == 1 else logits_BV[rows]
            if filters is None:
                tokens_B[rows] = part.argmax(-1)
                continue
            temperature, top_k, top_p, min_p = filters
            probs = probabilities(part, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
            uniforms = [self._rows[i].random.random() for i in rows]
            tokens_B[rows] = draw(probs, torch.tensor(uniforms, dtype=torch.float64, device=part.device))
        return tokens_B


def _fast_head(model: Decoder) -> Callable[[Tensor], Tensor]:
    """The model's head; for float32 on a CPU from a transposed copy of its table.

    The BLAS that torch brings reads a table of 16,384 x 256 in 2.1 ms to multiply one row by its rows, and in 0.4 ms to
    multiply it by its columns: a quarter of a decode step of a small model.
    """
    table_VD = model.model.embed_tokens.weight if model.lm_head is None else model.lm_head.weight
    if table_VD.device.type != "cpu" or table_VD.dtype != torch.float32:
        return model.head
    table_DV = table_VD.detach().t().contiguous()
    return lambda hidden_BD: hidden_BD @ table_DV
