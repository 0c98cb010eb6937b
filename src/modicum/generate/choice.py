"""The next token of each row, from its logits and what its own request asks for; no row looks at another."""

import random
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from modicum.generate.params import SamplingParams
from modicum.generate.sampler import penalize_repetition, sample
from modicum.store import UserError


class TokenMask(Protocol):
    """A grammar, as the sampler sees it. One belongs to one request; what it raises ends that request alone."""

    def allowed(self) -> Tensor | None:
        """Which ids may come next, (vocabulary,) bool on the CPU; None for all. Ids beyond its end may not."""
        ...

    def take(self, token: int) -> None:
        """This one was taken. Not called for a token that ends the answer."""
        ...

    def finished(self) -> bool:
        """Whether nothing may follow: the answer then ends with the reason "stop"."""
        ...


class Chooser:
    """What one request's choice depends on beside the logits: parameters, random numbers, tokens so far, mask.

    Its random numbers come from its own `random.Random`, whose sequence Python keeps from version to version.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        vocabulary: int,
        device: torch.device,
        mask: TokenMask | None = None,
    ) -> None:
        self.params, self.mask = params, mask
        self._random = random.Random(params.seed)
        self._device = device
        self._seen_V = self._counts_V = self._bias_V = None
        if params.repetition_penalty != 1:
            self._seen_V = torch.zeros(vocabulary, dtype=torch.bool, device=device)
            self._seen_V[list(prompt)] = True
        if params.frequency_penalty or params.presence_penalty:
            self._counts_V = torch.zeros(vocabulary, device=device)
        if params.logit_bias:
            self._bias_V = torch.zeros(vocabulary, device=device)
            self._bias_V[list(params.logit_bias)] = torch.tensor(
                list(params.logit_bias.values()), dtype=torch.float32, device=device
            )

    @property
    def plain(self) -> bool:
        """Whether the choice is the first of the largest logits as the model gave them."""
        return self.params.greedy and self.mask is None and not self.params.shapes_logits

    def settings(self) -> tuple[float, float, float, float, float]:
        """What `sample` asks of a row, with this request's next random number; a greedy one takes none."""
        p = self.params
        if p.greedy:
            return 0, 0, 1, 0, 0
        return p.temperature, p.top_k, p.top_p, p.min_p, self._random.random()

    def shape(self, logits_V: Tensor) -> Tensor:
        """After penalties, bias and mask. UserError when no token is left."""
        params = self.params
        if self._seen_V is not None:
            logits_V = penalize_repetition(logits_V, self._seen_V, params.repetition_penalty)
        if self._counts_V is not None:
            logits_V = logits_V - params.frequency_penalty * self._counts_V
            logits_V = logits_V - params.presence_penalty * (self._counts_V > 0)
        if self._bias_V is not None:
            logits_V = logits_V + self._bias_V
        allowed = None if self.mask is None else self.mask.allowed()
        if allowed is None:
            return logits_V
        open_V = torch.zeros(logits_V.shape, dtype=torch.bool)
        size = min(len(open_V), len(allowed))
        open_V[:size] = allowed[:size]
        logits_V = logits_V.masked_fill(~open_V.to(logits_V.device), -torch.inf)
        if logits_V.amax() == -torch.inf:
            raise UserError("the grammar allows no token here that this model can say; check it against the tokenizer")
        return logits_V

    def take(self, token: int, *, ends: bool) -> None:
        """Note what was chosen."""
        if self._seen_V is not None:
            self._seen_V[token] = True
        if self._counts_V is not None:
            self._counts_V[token] += 1
        if self.mask is not None and not ends:
            self.mask.take(token)


def choose(logits_RV: Tensor, choosers: Sequence[Chooser], never: Tensor) -> tuple[Tensor, dict[int, Exception]]:
    """One token id a row, (R,) int64, of float32 logits; `never` (ids) are not chosen.

    Also the rows whose mask failed, and with what; their token means nothing.
    """
    logits_RV = logits_RV.index_fill(-1, never, -torch.inf)
    failed: dict[int, Exception] = {}
    for row, chooser in enumerate(choosers):
        if chooser.mask is not None or chooser.params.shapes_logits:
            try:
                logits_RV[row] = chooser.shape(logits_RV[row])
            except Exception as error:  # whatever a caller's mask raises is that caller's
                failed[row] = error
    settings_R5 = torch.tensor([chooser.settings() for chooser in choosers], dtype=torch.float64)
    return sample(logits_RV, settings_R5), failed
