"""Which window of which source is row k of the run: a pure function of (seed, k), with no state and no buffer.

A source of n windows and weight w owes w·n rows a pass. Its j-th row is due at (2j + 1) / (2·w·n) passes, and the run
takes the rows in the order in which they are due (ties: by name), which is Sainte-Laguë's method of apportionment. So
sources interleave evenly, and p passes hold round(p·w·n) rows of each: exactly p times every window when w = 1.
"""

from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from math import floor, inf, isinf, lcm

import numpy as np

from modicum.data.order import order_key, things_at
from modicum.store import UserError


class Mixture:
    """The order of all rows. `windows` maps a source to its number of windows, `weights` to how often a pass sees each
    (default 1), `max_epochs` to how often the run may see it (default: no bound).

    `rows_per_pass` is how many rows one pass takes on average; `rows_available` is the longest run, in rows, that keeps
    every source within its max_epochs, None when nothing bounds it. Raises UserError for a source without windows.
    """

    def __init__(
        self,
        windows: Mapping[str, int],
        *,
        seed: int,
        weights: Mapping[str, float] | None = None,
        max_epochs: Mapping[str, float] | None = None,
    ) -> None:
        weights, max_epochs = weights or {}, max_epochs or {}
        _check_names(windows, weights, max_epochs)
        self.seed = seed
        self.names = sorted(windows)
        self.windows = [windows[name] for name in self.names]
        self.weights = [float(weights.get(name, 1.0)) for name in self.names]
        self.max_epochs = [float(max_epochs.get(name, inf)) for name in self.names]
        # as decimals, not binary fractions: a weight of 0.1 means a tenth, so ten passes hold every window once
        owed = [Fraction(str(weight)) * size for weight, size in zip(self.weights, self.windows, strict=True)]
        self.rows_per_pass = float(sum(owed))
        scale = lcm(*(rate.denominator for rate in owed))
        self._rates = [int(rate * scale) for rate in owed]
        common = lcm(*self._rates)
        self._spacing = [common // rate for rate in self._rates]
        self.rows_available = self._rows_available()
        names = self.names
        self._key = lru_cache(4 * len(names))(lambda source, epoch: order_key(seed, names[source], epoch))

    def counts(self, rows: int) -> list[int]:
        """How many of the run's first `rows` rows come from each source, in the order of `names`."""
        total, sources = sum(self._rates), len(self._rates)
        # all rows due by the moment (rows - sources/2) / total are at most `rows` and at least `rows - sources`
        moment = max(0, 2 * rows - sources)
        counts = [(rate * moment + total) // (2 * total) for rate in self._rates]
        for _ in range(rows - sum(counts)):
            counts[self._next(counts)] += 1
        return counts

    def rows(self, first: int, count: int) -> list[tuple[str, int]]:
        """(source, window) of the rows first..first+count-1 of the run."""
        counts = self.counts(first)
        sources, turns = [], []
        for _ in range(count):
            source = self._next(counts)
            sources.append(source)
            turns.append(counts[source])
            counts[source] += 1
        sizes = np.array([self.windows[source] for source in sources], np.int64)
        epochs, places = np.divmod(np.array(turns, np.int64), sizes)
        # a source's own sequence is one order after another, a new one each epoch
        orders = [self._key(source, epoch) for source, epoch in zip(sources, epochs.tolist(), strict=True)]
        windows = things_at(places, sizes, np.array(orders, np.uint64))
        return [(self.names[source], window) for source, window in zip(sources, windows.tolist(), strict=True)]

    def epochs(self, rows: int) -> dict[str, float]:
        """How often the first `rows` rows of the run see each source."""
        shares = zip(self.names, self.counts(rows), self.windows, strict=True)
        return {name: count / windows for name, count, windows in shares}

    def check(self, rows: int, *, batch_size: int) -> None:
        """Raise UserError naming every source that a run of `rows` rows would see more often than it may."""
        available = self.rows_available
        if available is None or rows <= available:
            return
        faults = [
            f"source {name}: {rows // batch_size} steps see it {epochs:.2f} times, and its max_epochs is {most:g}"
            for (name, epochs), most in zip(self.epochs(rows).items(), self.max_epochs, strict=True)
            if epochs > most
        ]
        mend = (
            f"take at most {available // batch_size} steps (of {batch_size} sequences), add text, "
            "lower the weight of these sources, or raise their max_epochs"
        )
        raise UserError("\n".join([*faults, mend]))

    def _next(self, counts: list[int]) -> int:
        """The source whose next row is due first."""
        due = [(2 * count + 1) * spacing for count, spacing in zip(counts, self._spacing, strict=True)]
        return due.index(min(due))

    def _rows_available(self) -> int | None:
        bounds = zip(self.max_epochs, self.windows, strict=True)
        turns = [None if isinf(most) else floor(Fraction(str(most)) * size) for most, size in bounds]
        ends = [self._rows_before(source, turn) for source, turn in enumerate(turns) if turn is not None]
        return min(ends, default=None)

    def _rows_before(self, source: int, turn: int) -> int:
        """How many of the run's rows come before this turn of a source."""
        due = (2 * turn + 1) * self._spacing[source]
        # a source that comes earlier by name goes first when both are due at once
        limits = [due if other < source else due - 1 for other in range(len(self.names))]
        return sum((limit // spacing + 1) // 2 for limit, spacing in zip(limits, self._spacing, strict=True))


def _check_names(windows: Mapping[str, int], weights: Mapping[str, float], max_epochs: Mapping[str, float]) -> None:
    if not windows:
        raise UserError(
            "the shards hold no tokens: every document was dropped, or none was given; see the corpus report"
        )
    for what, values in (("weight", weights), ("max_epochs", max_epochs)):
        for name, value in values.items():
            if not value > 0 or (what == "weight" and isinf(value)):
                raise ValueError(f"{what} of source {name} must be above 0, not {value}")
            if name not in windows:
                raise UserError(
                    f"source {name} has a {what} but no tokens in the shards (they hold "
                    f"{', '.join(sorted(windows))}): see the corpus report for what was dropped, or take the source "
                    "out of the recipe"
                )
