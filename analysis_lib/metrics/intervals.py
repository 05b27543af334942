"""95 % intervals of statistics over utterances, means over seeds, shares, and ratios."""

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import scipy
from jaxtyping import Float

CONFIDENCE = 0.95
# Quantile at the upper end of a symmetric interval.
UPPER_QUANTILE = (1 + CONFIDENCE) / 2
# Raise it in the commit that changes the intervals of tables, see ``measurement.versions``.
VERSION = 2
# With fewer seeds, Student's interval is too wide to decide anything: over two, it reaches 12.7
# standard errors to each side.
FEWEST_SEEDS = 5
# With fewer independent units, an interval covers the truth less often than 95 %: their number is
# printed beside it.
FEW_UNITS = 30
Z_95 = 1.959964


def jackknife_interval(
    point: np.ndarray,
    left_out: Iterable,
    smooth: bool = True,
) -> tuple[np.ndarray, np.ndarray]:
    r"""95 % jackknife interval of a statistic, from its values without each group of utterances.

    With G groups and values θ_(g), whose mean is θ̄, the squared standard error se² is (G − 1)/G ·
    Σ (θ_(g) − θ̄)². The interval reaches t · se to each side, with the 97.5 % quantile t of
    Student's law with G − 1 degrees of freedom (Miller 1974), around the value without its
    estimated bias, Gθ − (G − 1)θ̄ (Quenouille 1956). The correction is needed because pairs of
    tokens of one text inflate a statistic of few texts. The centre lies at most one se from θ: a
    larger shift means that the statistic jumps, not that it is biased.

    Args:
        point: the statistic on everything, of any shape.
        left_out: the statistic without each group, masked where it does not depend on the group;
            read one at a time, so that only one is in memory.
        smooth: False for a statistic that jumps when a group is left out, such as a median, a rank
            or a count: its bias cannot be estimated in this way, and the interval stays around θ.

    Returns:
        Lower and upper bounds, of the shape of ``point``; NaN where the statistic depends on fewer
        than two groups.

    >>> low, high = jackknife_interval(np.array(2.0), np.array([2.5, 2.0, 1.5]))
    >>> round(float(high - 2), 3)
    2.484

    Leaving out a group raises the statistic by 0.1 on average: the centre is 3 · 2.0 − 2 · 2.1 =
    1.8.

    >>> low, high = jackknife_interval(np.array(2.0), np.array([2.6, 2.1, 1.6]))
    >>> round(float(low + high) / 2, 3)
    1.8
    """
    groups = np.array(0)
    mean = np.zeros(np.shape(point))
    square = np.zeros_like(mean)
    # Tables have millions of rows: the buffers are allocated once.
    step = np.empty_like(mean)
    part = np.empty_like(mean)
    for without in left_out:
        values = np.ma.getdata(without)
        mask = np.ma.getmask(without)
        if np.any(mask):
            groups = groups + ~mask
            values = np.where(mask, mean, values)
        else:
            groups = groups + 1
        # Running mean and sum of squares (Welford 1962).
        np.subtract(values, mean, out=step)
        mean += np.divide(step, np.maximum(groups, 1), out=part)
        np.subtract(values, mean, out=part)
        part *= step
        square += part
    several = np.where(groups > 1, groups, np.nan)
    error = np.sqrt((several - 1) / several * square)
    most = int(np.max(groups, initial=0))
    reach = _quantiles(most)[groups] * error
    centre = np.asarray(point)
    if smooth:
        bias = np.subtract(mean, point, out=part)
        bias *= several - 1
        np.clip(bias, -error, error, out=bias)
        centre = centre - bias
    return np.asarray(centre - reach), np.asarray(centre + reach)


@functools.cache
def _quantiles(most: int) -> np.ndarray:
    """Quantiles of Student's law, indexed by the number of groups, up to ``most``."""
    freedom = np.arange(most + 1) - 1
    return scipy.stats.t.ppf(UPPER_QUANTILE, freedom)


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval and its number of independent units; it prints itself.

    Attributes:
        value: the number; NaN where there is none.
        ci_low, ci_high: the ends of its interval, NaN without one. An interval of zero width counts
            as none: the number does not vary with the units.
        draws: the number of independent units, such as seeds or groups of texts, if known.
        scale: ``linear``, or ``fisher`` for a correlation r, whose interval is symmetric in artanh
            r.
        centre: the centre of the interval on that scale: the number without its bias, see
            :func:`jackknife_interval`. By default, the middle between the ends.

    >>> found = Estimate(0.2412, 0.2215, 0.2609)
    >>> print(f"{found}, {found:.3f}", Estimate(0.24))
    0.24 [0.22, 0.26], 0.241 [0.222, 0.261] 0.24
    >>> found.side(0.2), found.side(0.25), found.side(0.3), Estimate(0.24).side(0.3)
    ('above', 'undecided', 'below', '')
    """

    value: float
    ci_low: float = math.nan
    ci_high: float = math.nan
    draws: int | float = math.inf
    scale: str = "linear"
    centre: float = math.nan

    def __post_init__(self) -> None:
        has_interval = self.ci_high > self.ci_low and math.isfinite(self.value)
        if not has_interval:
            nothing = dict.fromkeys(("ci_low", "ci_high", "centre"), math.nan)
            self.__dict__.update(nothing)
        elif math.isnan(self.centre):
            low = self._straight(self.ci_low)
            high = self._straight(self.ci_high)
            middle = self._curved((low + high) / 2)
            self.__dict__.update(centre=middle)

    def __format__(self, form: str) -> str:
        form = form or "z.2f"
        if math.isnan(self.value):
            return "none"
        number = format(self.value, form)
        if math.isnan(self.ci_low):
            return number
        low = format(self.ci_low, form)
        high = format(self.ci_high, form)
        return f"{number} [{low}, {high}]"

    def __str__(self) -> str:
        return format(self)

    def __neg__(self) -> "Estimate":
        return replace(
            self,
            value=-self.value,
            ci_low=-self.ci_high,
            ci_high=-self.ci_low,
            centre=-self.centre,
        )

    @property
    def row(self) -> tuple[float, float, float]:
        """The value and the ends of its interval, as the columns of a table."""
        return self.value, self.ci_low, self.ci_high

    def side(self, bound: float) -> str:
        """Side of a bound on which the whole interval lies: ``above``, ``below`` or ``undecided``.

        Without an interval, the empty string.
        """
        if math.isnan(self.ci_low):
            return ""
        if self.ci_low > bound:
            return "above"
        if self.ci_high <= bound:
            return "below"
        return "undecided"

    def within(self, least: float, most: float) -> "Estimate":
        """The same estimate, with its interval cut to the range of its quantity.

        Its centre, and therefore its p-values, do not change.
        """
        low = max(self.ci_low, least)
        high = min(self.ci_high, most)
        return replace(self, ci_low=low, ci_high=high)

    def p(self, bound: float) -> float:
        """Two-sided p-value of the hypothesis that the true value is ``bound``.

        Student's t over the draws, or the normal law if their number is not known, around the
        centre of the interval and on the scale on which the interval is symmetric. NaN without an
        interval.

        >>> round(Estimate(1.0, 0.0, 2.0).p(0.0), 3)
        0.05
        """
        if math.isnan(self.ci_low):
            return math.nan
        distance = abs(self._straight(self.centre) - self._straight(bound))
        in_errors = self._law.ppf(UPPER_QUANTILE) * distance / self._reach
        return float(2 * self._law.sf(in_errors))

    def wider(self, tests: int) -> "Estimate":
        """The same estimate with its interval widened for several tests at once (Bonferroni)."""
        level = 1 - (1 - CONFIDENCE) / 2 / tests
        reach = self._reach * self._law.ppf(level) / self._law.ppf(UPPER_QUANTILE)
        centre = self._straight(self.centre)
        low = self._curved(centre - reach)
        high = self._curved(centre + reach)
        return replace(self, ci_low=low, ci_high=high)

    @property
    def _law(self) -> "scipy.stats.rv_frozen":
        if math.isfinite(self.draws):
            return scipy.stats.t(self.draws - 1)
        return scipy.stats.norm()

    @property
    def _reach(self) -> float:
        """Half-width of the interval, from its centre to the farther end.

        An end that was cut at a limit lies nearer to the centre.
        """
        low = self._straight(self.ci_low)
        centre = self._straight(self.centre)
        high = self._straight(self.ci_high)
        return max(centre - low, high - centre)

    def _straight(self, number: float) -> float:
        """The number on the scale where the interval is symmetric.

        There, a correlation of ±1 is infinite.
        """
        if self.scale == "linear":
            return number
        if abs(number) >= 1:
            return math.copysign(math.inf, number)
        return math.atanh(number)

    def _curved(self, number: float) -> float:
        """The inverse of :meth:`_straight`."""
        return math.tanh(number) if self.scale == "fisher" else number


def jackknife(
    value: Any,
    left_out: Sequence[Any],
    smooth: bool = True,
) -> Estimate | list[Estimate]:
    """A statistic with its :func:`jackknife_interval`; a list if there are several numbers.

    Args:
        value: the statistic on all units: a number, or an array of numbers.
        left_out: the same without each unit.
        smooth: see :func:`jackknife_interval`.

    >>> print(jackknife(2.0, [2.5, 2.0, 1.5]))
    2.00 [-0.48, 4.48]
    """
    value = np.asarray(value, dtype=float)
    low, high = jackknife_interval(value, left_out, smooth)
    estimates = []
    for number, *ends in zip(value.flat, low.flat, high.flat, strict=True):
        estimate = Estimate(float(number), *map(float, ends), draws=len(left_out))
        estimates.append(estimate)
    return estimates if value.ndim else estimates[0]


@dataclass(frozen=True)
class Least(Estimate):
    """The smallest of several numbers, as :func:`least` gives it.

    Attributes:
        parts: the numbers.
    """

    parts: tuple[Estimate, ...] = ()

    def __neg__(self) -> Estimate:
        # Negated, it is the largest of several numbers, for which there is no p-value.
        return Estimate(
            -self.value,
            -self.ci_high,
            -self.ci_low,
            self.draws,
            self.scale,
        )

    def p(self, bound: float) -> float:
        """The p-value of the hypothesis that the smallest number equals ``bound``.

        If the smallest lies above the bound, it is the largest p-value of the parts
        (intersection-union); otherwise the smallest p-value of the parts at or below the bound,
        corrected for their number (Bonferroni).
        """
        every = [part.p(bound) for part in self.parts]
        if math.isnan(self.value):
            return math.nan
        if self.value > bound:
            return float(np.max(every))
        is_below = (part.value <= bound for part in self.parts)
        least = np.min([*itertools.compress(every, is_below)])
        return min(1.0, len(every) * float(least))


def least(parts: Sequence[Estimate]) -> Estimate:
    """The smallest of several numbers, such as those of all layers, with its 95 % interval.

    The jackknife of a minimum is not consistent. Here the lower end is the smallest of the lower
    ends: all numbers lie above a bound where each does (intersection-union; Berger 1982). The upper
    end is the smallest of the upper ends after all intervals have been widened to hold at once
    (Bonferroni). There is no interval where one of the numbers has none.

    >>> print(least([Estimate(0.3, 0.2, 0.4), Estimate(0.25, 0.15, 0.35)]))
    0.25 [0.15, 0.36]
    """
    if len(parts) == 1:
        return parts[0]
    value = float(np.min([part.value for part in parts]))
    low = float(np.min([part.ci_low for part in parts]))
    high = float(np.min([part.wider(len(parts)).ci_high for part in parts]))
    draws = min(part.draws for part in parts)
    return Least(value, low, high, draws, parts=tuple(parts))


def mean_interval(
    values: Iterable[float],
    fewest: int = 2,
) -> Estimate:
    """Mean and 95 % interval of independent draws.

    The interval is mean ± t · s/√n, with Student's t of n − 1 degrees of freedom. There is none of
    fewer than ``fewest`` draws.

    >>> print(mean_interval([1.0, 2.0, 3.0]))
    2.00 [-0.48, 4.48]
    """
    values = np.asarray([*values], dtype=float)
    draws = len(values)
    mean = reach = math.nan
    if draws:
        mean = float(values.mean())
    if draws >= fewest:
        quantile = scipy.stats.t.ppf(UPPER_QUANTILE, draws - 1)
        reach = float(quantile * scipy.stats.sem(values))
    return Estimate(mean, mean - reach, mean + reach, draws)


def seed_interval(values: Iterable[float]) -> Estimate:
    """The :func:`mean_interval` of one number per training; it needs ``FEWEST_SEEDS`` of them."""
    return mean_interval(values, FEWEST_SEEDS)


def seed_and_unit_interval(estimates: Iterable[Estimate]) -> Estimate:
    """Mean and 95 % interval over seeds of numbers that each have an interval over the same texts.

    Half-widths add in quadrature, like independent errors: that of :func:`seed_interval`, and the
    mean half-width over texts, which all seeds share. The interval is centred on the mean of the
    seeds' centres. Pictures may take the place of texts.

    >>> seeds = [Estimate(n, n - 1, n + 1) for n in (1.0, 2.0, 3.0, 4.0, 5.0)]
    >>> print(seed_and_unit_interval(seeds))
    3.00 [0.80, 5.20]
    """
    estimates = [*estimates]
    mean = seed_interval(estimate.value for estimate in estimates)
    # An interval of zero width counts as none: it contributes no width and no bias.
    widths = [estimate.ci_high - estimate.ci_low for estimate in estimates]
    biases = [estimate.value - estimate.centre for estimate in estimates]
    over_units = np.nan_to_num(widths).mean() / 2
    over_seeds = np.nan_to_num((mean.ci_high - mean.ci_low) / 2)
    reach = math.hypot(over_seeds, over_units)
    if len(estimates) < FEWEST_SEEDS:
        reach = math.nan
    centre = mean.value - np.nan_to_num(biases).mean()
    return Estimate(mean.value, centre - reach, centre + reach, mean.draws)


def correlation(
    r: float,
    items: int,
    rank: bool = False,
) -> Estimate:
    """A correlation over independent items with its 95 % interval, by Fisher's transformation.

    Args:
        r: Pearson's correlation, or with ``rank`` Spearman's.
        items: the number of items, n; an interval needs at least 4.
        rank: use the variance of Bonett and Wright (2000), (1 + r²/2) / (n − 3); a perfect order
            counts as the closest imperfect one.

    >>> print(correlation(0.5, 30))
    0.50 [0.17, 0.73]
    """
    if items < 4 or math.isnan(r):
        return Estimate(r)
    most = 1 - 1e-9
    variance = 1 / (items - 3)
    if rank:
        most = 1 - 12 / max(items**3 - items, 24)
        variance = (1 + r**2 / 2) / (items - 3)
    reach = Z_95 * math.sqrt(variance)
    middle = math.atanh(min(max(r, -most), most))
    low = math.tanh(middle - reach)
    high = math.tanh(middle + reach)
    return Estimate(r, low, high, scale="fisher")


@dataclass(frozen=True)
class Share(Estimate):
    """A share of independent items with the interval of Wilson (1927), as :func:`share` gives it.

    ``draws`` is the number of items.
    """

    def p(self, bound: float) -> float:
        """The p-value of the score test, which Wilson's interval inverts."""
        distance = abs(self.value - bound)
        # A negated share has a negative value and a negative bound.
        bound = abs(bound)
        if not 0 < bound < 1:
            return float(distance == 0)
        error = math.sqrt(bound * (1 - bound) / self.draws)
        return float(2 * scipy.stats.norm.sf(distance / error))


def share(correct: int, items: int) -> Share:
    """A share of independent items and its 95 % interval, after Wilson (1927).

    >>> print(share(10, 10))
    1.00 [0.72, 1.00]
    """
    test = scipy.stats.binomtest(correct, items)
    interval = test.proportion_ci(CONFIDENCE, method="wilson")
    return Share(
        correct / items,
        float(interval.low),
        float(interval.high),
        items,
    )


def ratio(
    totals: Float[np.ndarray, " item"],
    sizes: Float[np.ndarray, " item"],
) -> Estimate:
    """The ratio Σ totals / Σ sizes and its 95 % interval over items, by the delta method.

    >>> print(ratio(np.array([2.0, 5.0, 6.0]), np.array([1.0, 2.0, 3.0])))
    2.17 [1.83, 2.51]
    """
    ratio = totals.sum() / sizes.sum()
    residuals = totals - ratio * sizes
    items = len(sizes)
    spread = math.sqrt(items / max(items - 1, 1) * (residuals**2).sum())
    reach = Z_95 * spread / sizes.sum()
    return Estimate(float(ratio), float(ratio - reach), float(ratio + reach), items)
