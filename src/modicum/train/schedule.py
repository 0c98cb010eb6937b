"""The learning rate of an update, as a pure function of its number and the run's length.

Stateless on purpose: a resumed run needs only the step. Extending a run therefore changes the rate of every update that
is still to come, never of one that was made.
"""

from dataclasses import dataclass
from math import cos, pi
from typing import Literal


@dataclass(frozen=True)
class Schedule:
    """Warm-up, then a cosine or a plateau with a linear cooldown; lengths are shares of the run's updates.

    The rate rises to `peak` and ends near `peak * final_fraction`. decay_fraction belongs to "wsd" alone.
    """

    kind: Literal["cosine", "wsd"]
    peak: float
    final_fraction: float = 0.0
    warmup_fraction: float = 0.02
    decay_fraction: float = 0.5

    def rate(self, step: int, total: int) -> float:
        """Learning rate of update `step` (0-based) of `total`."""
        final, warmup = self.peak * self.final_fraction, round(self.warmup_fraction * total)
        if self.kind == "cosine":
            return warmup_cosine(step, peak=self.peak, final=final, warmup=warmup, total=total)
        decay = min(round(self.decay_fraction * total), total - warmup)  # both may have been rounded up
        return warmup_stable_decay(step, peak=self.peak, final=final, warmup=warmup, decay=decay, total=total)


def warmup_cosine(step: int, *, peak: float, final: float, warmup: int, total: int) -> float:
    """Linear to `peak` within `warmup` updates, then half a cosine to `final` (Loshchilov & Hutter 2017).

    Update 0 already moves. `final` would be reached by the update after the last one, which moves too where it is 0.
    """
    if warmup > total:
        raise ValueError(f"a warm-up of {warmup} updates does not fit into {total}")
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup + 1) / (total - warmup + 1)
    return final + (peak - final) * (1 + cos(pi * done)) / 2


def warmup_stable_decay(step: int, *, peak: float, final: float, warmup: int, decay: int, total: int) -> float:
    """Linear to `peak`, held, then linear to `final` in the last `decay` updates (Hu et al. 2024, Hägele et al. 2024).

    Update 0 already moves. `final` would be reached by the update after the last one, which moves too where it is 0.
    """
    if warmup + decay > total:
        raise ValueError(f"warm-up of {warmup} and decay of {decay} updates do not fit into {total}")
    if step < warmup:
        return peak * (step + 1) / warmup
    left = total - step
    return peak if left > decay else final + (peak - final) * left / (decay + 1)
