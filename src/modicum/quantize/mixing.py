"""Which matrices get more bits: those whose rounding costs most for the bytes it saves, until the budget is met."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from modicum.evaluate.divergence import Limits, Quality
from modicum.model import Decoder
from modicum.model.packing import RoundedMatrix
from modicum.quantize.judging import Judge, Matrices, rounded


@dataclass(frozen=True)
class Mix:
    """matrices: what is rounded, and how. promoted: those that were given more bits, the dearest first."""

    matrices: dict[str, RoundedMatrix]
    promoted: tuple[str, ...]
    quality: Quality


def mix(
    judge: Judge,
    model: Decoder,
    matrices: Matrices,
    better: Mapping[str, RoundedMatrix | None],
    costs: Mapping[str, float],
    limits: Limits,
    *,
    say: Callable[[str], None],
) -> Mix:
    """The fewest promotions with which the limits hold; with all of them where none suffices.

    better: what a matrix becomes when it is promoted, None for full precision; those that are not named stay. costs:
    what each one's rounding costs (nats).
    """
    order = sorted(better, key=lambda name: -costs[name] / matrices[name].values.numel())

    def promoted(count: int) -> Mix:
        chosen = {**matrices, **{name: better[name] for name in order[:count]}}
        kept = {name: matrix for name, matrix in chosen.items() if matrix is not None}
        with rounded(model, kept):
            found = judge(model)
        say(f"{count} of {len(order)} matrices with more bits: mean KL divergence {found.mean_kl:.2e}")
        return Mix(kept, tuple(order[:count]), found)

    best = promoted(0)
    if not best.quality.faults(limits):
        return best
    low, high, best = 0, len(order), promoted(len(order))
    if best.quality.faults(limits):
        return best
    while high - low > 1:
        middle = (low + high) // 2
        found = promoted(middle)
        if found.quality.faults(limits):
            low = middle
        else:
            high, best = middle, found
    return best
