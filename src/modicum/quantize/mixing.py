"""Which matrices get more bits: those whose rounding costs most for the bytes it saves, until the budget is met.

The kernels of decoding multiply those of one input together, which must be rounded all or none: such matrices get full
precision together.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from modicum.evaluate.divergence import Limits, Quality
from modicum.model import Decoder
from modicum.model.packing import RoundedMatrix
from modicum.quantize.judging import Judge, Matrices, rounded

# The matrices of a layer that have one input.
_TOGETHER = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate and up", "up_proj": "gate and up"}


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
    units: dict[str, list[str]] = {}
    for name in sorted(better, key=lambda name: -costs[name]):
        units.setdefault(_unit(name, better[name]), []).append(name)

    def worth(unit: list[str]) -> float:
        return sum(costs[name] for name in unit) / sum(matrices[name].values.numel() for name in unit)

    order = sorted(units.values(), key=worth, reverse=True)

    def promoted(count: int) -> Mix:
        names = tuple(name for unit in order[:count] for name in unit)
        chosen = {**matrices, **{name: better[name] for name in names}}
        kept = {name: matrix for name, matrix in chosen.items() if matrix is not None}
        with rounded(model, kept):
            found = judge(model)
        say(f"{len(names)} of {len(better)} matrices with more bits: mean KL divergence {found.mean_kl:.2e}")
        return Mix(kept, names, found)

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


def _unit(name: str, better: RoundedMatrix | None) -> str:
    """What a matrix is promoted with: itself alone where it stays rounded."""
    layer, _, own = name.rpartition(".")
    return name if better is not None else f"{layer}.{_TOGETHER.get(own, own)}"
