"""How sure a figure is: percentile intervals from resampling what was measured (Efron 1979), seeded.

Where resampling says nothing, because there is one unit or all of them agree, no certainty is made of it.
"""

from math import sqrt

import numpy as np
from numpy.typing import ArrayLike

# Resampled counts held at once: bounds memory at some 32 MB.
_CELLS = 4_000_000
_LOW, _HIGH = 2.5, 97.5
_Z = 1.96  # standard deviations that hold 95 %


def ratio_interval(
    numerators: ArrayLike, denominators: ArrayLike, *, samples: int, seed: int
) -> tuple[float, float] | tuple[None, None]:
    """95 % interval of sum(numerators) / sum(denominators) over units that are drawn anew with replacement.

    One pair a unit (a document, an item); a single unit has no interval. Raises ValueError for no units, or a resample
    whose denominator is 0.
    """
    top, bottom = np.asarray(numerators, dtype=np.float64), np.asarray(denominators, dtype=np.float64)
    if top.size == 0 or top.shape != bottom.shape:
        raise ValueError(f"expected as many numerators as denominators, and some: {top.shape}, {bottom.shape}")
    if top.size == 1 and bottom.all():
        return None, None
    random = np.random.default_rng(seed)
    units, ratios = top.size, []
    for start in range(0, samples, max(1, _CELLS // units)):
        count = min(max(1, _CELLS // units), samples - start)
        drawn = random.integers(0, units, size=(count, units))
        ratios.append(top[drawn].sum(1) / bottom[drawn].sum(1))
    low, high = np.percentile(np.concatenate(ratios), [_LOW, _HIGH])
    if not np.isfinite([low, high]).all():
        raise ValueError("a resample has nothing to divide by")
    return float(low), float(high)


def share_interval(marks: ArrayLike, *, samples: int, seed: int) -> tuple[float, float]:
    """95 % interval of the mean of marks from 0 to 1: the bootstrap's, and at least as wide as Wilson's.

    That one has a continuity correction (Newcombe 1998, method 4), without which 2 of 2 right would be above a chance
    of 1 in 3.
    """
    units = np.asarray(marks, dtype=np.float64)
    drawn = ratio_interval(units, np.ones_like(units), samples=samples, seed=seed)
    lows, highs = zip(drawn, _wilson(float(units.mean()), units.size), strict=True)
    return min(low for low in lows if low is not None), max(high for high in highs if high is not None)


def _wilson(share: float, n: int) -> tuple[float, float]:
    """The shares that z allows for `share` of n."""

    def low(p: float) -> float:
        if p * n <= 0.5:  # the correction is half a unit
            return 0.0
        root = sqrt(_Z**2 - 2 - 1 / n + 4 * p * (n * (1 - p) + 1))
        return (2 * n * p + _Z**2 - 1 - _Z * root) / (2 * (n + _Z**2))

    return low(share), 1 - low(1 - share)
