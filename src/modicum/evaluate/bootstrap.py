"""How sure a figure is: percentile intervals from resampling what was measured (Efron 1979), seeded."""

import numpy as np
from numpy.typing import ArrayLike

# Resampled counts held at once: bounds memory at some 32 MB.
_CELLS = 4_000_000
_LOW, _HIGH = 2.5, 97.5


def ratio_interval(numerators: ArrayLike, denominators: ArrayLike, *, samples: int, seed: int) -> tuple[float, float]:
    """95 % interval of sum(numerators) / sum(denominators) over units that are drawn anew with replacement.

    One pair a unit (a document, an item). Raises ValueError for no units, or a resample whose denominator is 0.
    """
    top, bottom = np.asarray(numerators, dtype=np.float64), np.asarray(denominators, dtype=np.float64)
    if top.size == 0 or top.shape != bottom.shape:
        raise ValueError(f"expected as many numerators as denominators, and some: {top.shape}, {bottom.shape}")
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


def mean_interval(values: ArrayLike, *, samples: int, seed: int) -> tuple[float, float]:
    """95 % interval of a mean over its units."""
    units = np.asarray(values, dtype=np.float64)
    return ratio_interval(units, np.ones_like(units), samples=samples, seed=seed)
