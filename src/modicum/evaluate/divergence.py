"""How far a model of rounded weights leaves what full precision says: KL divergence and agreement, text by text."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from modicum.store import UserError

CLEAR = 0.01  # of a logit
MOST_UNDECIDED = 0.02  # of the positions may be left out as undecided where a first choice is held to another's


LOOSEN = "what is allowed: --max-kl and --min-agreement say it"


@dataclass(frozen=True)
class Limits:
    """What is refused: a mean or 99th-percentile KL divergence (nats) above, a top-1 agreement below; where weights are
    float32 also a difference of one logit above."""

    mean_kl: float
    tail_kl: float
    agreement: float
    logit: float | None = None

    @property
    def clear(self) -> float:
        """By how much a first choice must be ahead to be the other's too: ten times what a logit may be off, and never
        more than CLEAR, for a wide limit would leave no position to judge by."""
        return CLEAR if self.logit is None else min(CLEAR, 10 * self.logit)

    def with_bounds(
        self, *, max_kl: float | None = None, min_agreement: float | None = None, max_difference: float | None = None
    ) -> "Limits":
        """Where one is given, it instead: the mean's KL divergence, and ten times it for the tail's; a share; a logit.

        Raises UserError, by the options' names, for a number that cannot be one.
        """
        if max_kl is not None and not 0 < max_kl <= 100:
            raise UserError(f"--max-kl {max_kl:g}: expected a number of nats above 0, such as 0.01")
        if min_agreement is not None and not 0 <= min_agreement <= 1:
            raise UserError(f"--min-agreement {min_agreement:g}: expected a share from 0 to 1, such as 0.98")
        if max_difference is not None and not 0 < max_difference <= 1:
            raise UserError(f"--max-difference {max_difference:g}: expected a part of a logit, such as 1e-4")
        return Limits(
            self.mean_kl if max_kl is None else max_kl,
            self.tail_kl if max_kl is None else 10 * max_kl,
            self.agreement if min_agreement is None else min_agreement,
            self.logit if max_difference is None else max_difference,
        )


@dataclass(frozen=True)
class Quality:
    """positions compared; KL divergence from full precision in nats; how often the likeliest token is the same; clear:
    positions where full precision prefers it by more than `margin` of a logit, and in how many of these it is
    another."""

    positions: int
    mean_kl: float
    tail_kl: float
    agreement: float
    clear: int
    clear_differing: int
    margin: float = CLEAR

    @property
    def undecided(self) -> float:
        """The share of positions at which full precision prefers none."""
        return 1 - self.clear / self.positions

    def faults(self, limits: Limits) -> list[str]:
        """What is over its limit, in a line each."""
        found = []
        if not self.mean_kl <= limits.mean_kl:
            found.append(f"mean KL divergence {self.mean_kl:.3g}, allowed {limits.mean_kl:g}")
        if not self.tail_kl <= limits.tail_kl:
            found.append(f"99th percentile of the KL divergence {self.tail_kl:.3g}, allowed {limits.tail_kl:g}")
        if not self.agreement >= limits.agreement:
            found.append(f"top-1 agreement {self.agreement:.2%}, asked for {limits.agreement:.2%}")
        return found

    def other_choices(self) -> list[str]:
        """In a line each, that another first choice was found where it is clear, and that it is clear too seldom."""
        found = []
        if self.clear_differing:
            found.append(f"another first choice at {self.clear_differing} of {self.clear} clear positions")
        even, most = self.positions - self.clear, MOST_UNDECIDED * self.positions
        if even > most + 3 * sqrt(most):  # by chance some more may be even, which counts where positions are few
            found.append(
                f"no first choice is ahead by more than {self.margin:g} at {even} of {self.positions} positions, and "
                f"at most {MOST_UNDECIDED:.0%} may be left out: judge by other text, or more of it (--heldout, --texts)"
            )
        return found


def quality(full: Iterable[Any], found: Iterable[Any], *, clear: float = CLEAR) -> Quality:
    """Compare logits (T, V), NumPy's or torch's, of the same texts: `full` precision's, and what was `found`.

    One text at a time, in float64. clear: of a logit, by how much a first choice must be ahead to count as clear.
    """
    divergence, same, ahead = [], [], []
    for truth, other in zip(map(_log_softmax, full), map(_log_softmax, found), strict=True):
        divergence.append((truth.exp() * (truth - other)).sum(-1))
        same.append(truth.argmax(-1) == other.argmax(-1))
        best, second = truth.topk(2, -1).values.unbind(-1)
        ahead.append(best - second > clear)
    divergences, agreeing, decided = (torch.cat(parts) for parts in (divergence, same, ahead))
    return Quality(
        positions=len(divergences),
        mean_kl=float(divergences.mean()),
        tail_kl=_quantile(divergences, 0.99),
        agreement=float(agreeing.double().mean()),
        clear=int(decided.sum()),
        clear_differing=int((decided & ~agreeing).sum()),
        margin=clear,
    )


def _log_softmax(logits: Any) -> Tensor:
    return torch.as_tensor(logits).double().log_softmax(-1)


def _quantile(values: Tensor, share: float) -> float:
    """Between neighbours, as NumPy has it; torch's own refuses more than 16 million."""
    ordered = values.sort().values
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return float(ordered[low] + (ordered[high] - ordered[low]) * (place - low))
