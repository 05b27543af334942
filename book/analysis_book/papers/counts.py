"""Numbers that no text and no seed changes: shares with exact intervals, and ranks.

A jackknife has no width then. Of a share there is a count all the same: 12 heads of 12 say more
than 2 of 2.
"""

import math
from dataclasses import dataclass

import pandas as pd
from scipy import stats

from analysis_lib.metrics.intervals import CONFIDENCE, FEWEST_SEEDS, Estimate, seed_interval


@dataclass(frozen=True)
class Count(Estimate):
    """A share of items with its exact interval, as :func:`exact` gives it.

    ``draws`` is the number of items.
    """

    def p(self, bound: float) -> float:
        """Twice the smaller tail of the binomial law whose share is the bound.

        >>> round(exact(5, 5).p(0.5), 4)
        0.0625
        """
        # A negated share has a negative bound.
        bound = abs(bound)
        if not 0 <= bound <= 1:
            return 0.0
        below = stats.binom.cdf(self._items, self.draws, bound)
        above = stats.binom.sf(self._items - 1, self.draws, bound)
        return float(min(1, 2 * min(below, above)))

    def wider(self, tests: int) -> "Estimate":
        """The same share with its interval for several tests at once (Bonferroni)."""
        level = 1 - (1 - CONFIDENCE) / tests
        share = exact(self._items, int(self.draws), level)
        is_negated = self.ci_low < 0
        return -share if is_negated else share

    @property
    def _items(self) -> int:
        return round(abs(self.value) * self.draws)


def exact(count: int, items: int, level: float = CONFIDENCE) -> Count:
    """A share of items with its exact interval, after Clopper and Pearson (1934).

    >>> print(exact(12, 12), exact(0, 12))
    1.00 [0.74, 1.00] 0.00 [0.00, 0.26]
    """
    interval = stats.binomtest(count, items).proportion_ci(level)
    return Count(count / items, float(interval.low), float(interval.high), items)


def pooled(counted: pd.Series) -> Estimate:
    """The share of the items of several trainings that are counted.

    The interval is Student's over the trainings. Where all have the same share, that interval has
    no width, and the exact one of all items together takes its place.

    Args:
        counted: whether each item counts; the last level of the index is the seed of its training.

    >>> heads = pd.Series(60 * [True], index=5 * [*range(5)] * 2 + 10 * [0])
    >>> print(pooled(heads))
    1.00 [0.94, 1.00]
    """
    shares = counted.groupby(level=-1).mean()
    if len(shares) >= FEWEST_SEEDS and shares.nunique() == 1:
        return exact(int(counted.sum()), len(counted))
    return seed_interval(shares)


@dataclass(frozen=True)
class Settled(Estimate):
    """A number that is the same whichever texts are left out, such as a correlation of ranks.

    It has no interval, and lies on one side of a bound or the other.

    >>> Settled(0.9).side(0.0), Settled(-0.9).side(0.0)
    ('above', 'below')
    """

    def side(self, bound: float) -> str:
        if math.isnan(self.value):
            return ""
        return "above" if self.value > bound else "below"
