"""95 % intervals: of statistics over utterances, of means over seeds, of shares, and of ratios."""

import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np
import scipy
from jaxtyping import Float

CONFIDENCE = 0.95
# Student's interval over fewer seeds is too wide to decide anything: over two, it is 12.7 standard errors to each side.
FEWEST_SEEDS = 5
Z_95 = 1.959964


def jackknife_interval(
    point: np.ndarray, left_out: Iterable, part: Iterable | None = None
) -> tuple[np.ndarray, np.ndarray]:
    r"""The 95 % interval of a statistic from its values with one group of utterances left out at a time.

    With g groups and values θ_(i), the variance is (g − 1)/g · Σ (θ_(i) − mean θ)², and the interval is
    θ ± t · √variance with the 97.5 % quantile of Student's t with g − 1 degrees of freedom (Miller 1974).

    Args:
        point: the statistic on everything, of any shape.
        left_out: the statistic without each group; of large ones, one is in memory at a time.
        part: for each group, of the same shape, whether it has a part in the statistic; by default, every group has.

    Returns:
        Lower and upper bounds, of the shape of ``point``; NaN where fewer than two groups have a part.

    >>> low, high = jackknife_interval(np.array(2.0), np.array([2.5, 2.0, 1.5]))
    >>> round(float(high - 2), 3)
    2.484
    """
    groups, mean, square = np.zeros(np.shape(point), int), np.zeros(np.shape(point)), np.zeros(np.shape(point))
    for values, has_part in zip(left_out, itertools.repeat(True) if part is None else part, strict=False):
        # Running mean and sum of squares (Welford 1962).
        groups = groups + has_part
        step = np.where(has_part, values - mean, 0)
        mean = mean + step / np.maximum(groups, 1)
        square = square + np.where(has_part, step * (values - mean), 0)
    several = np.where(groups > 1, groups, np.nan)
    spread = np.sqrt((several - 1) / several * square)
    reach = np.asarray(scipy.stats.t.ppf((1 + CONFIDENCE) / 2, several - 1) * spread)
    return np.asarray(point - reach), np.asarray(point + reach)


def mean_interval(values: Iterable[float], fewest: int = 2) -> tuple[float, float, float]:
    """Mean and 95 % interval of independent draws: mean ± t · s/√n with Student's t of n − 1 degrees of freedom.

    The interval of fewer than ``fewest`` draws is NaN.

    >>> [round(number, 3) for number in mean_interval([1.0, 2.0, 3.0])]
    [2.0, -0.484, 4.484]
    """
    values = np.asarray([*values], dtype=float)
    mean, reach = float(values.mean()) if len(values) else math.nan, math.nan
    if len(values) >= fewest:
        reach = float(scipy.stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1) * scipy.stats.sem(values))
    return mean, mean - reach, mean + reach


def seed_interval(values: Iterable[float]) -> tuple[float, float, float]:
    """The :func:`mean_interval` of numbers of one training each, of which ``FEWEST_SEEDS`` are needed."""
    return mean_interval(values, FEWEST_SEEDS)


def seed_and_unit_interval(estimates: Iterable[Iterable[float]]) -> tuple[float, float, float]:
    """Mean and 95 % interval over seeds of numbers that each have an interval over the same texts, or pictures.

    Half-widths add like independent errors: that of :func:`seed_interval`, and that over texts, mean over seeds, which
    all of them share.

    Args:
        estimates: for each seed the value, and the ends of its interval over texts.

    >>> [round(number, 3) for number in seed_and_unit_interval([(n, n - 1, n + 1) for n in (1.0, 2.0, 3.0, 4.0, 5.0)])]
    [3.0, 0.797, 5.203]
    """
    values, low, high = np.transpose(np.asarray([*estimates], dtype=float))
    mean, *ends = seed_interval(values)
    reach = math.hypot((ends[1] - ends[0]) / 2, float((high - low).mean()) / 2)
    return mean, mean - reach, mean + reach


def two_sided_p(value: float, low: float, high: float, bound: float, draws: float = math.inf) -> float:
    """The probability that a number whose true value is ``bound`` lies as far from it, read off its 95 % interval.

    By Student's t over so many ``draws``, or the normal law; of an interval that is not symmetric, the side of the
    bound counts. NaN where there is no interval.

    >>> round(two_sided_p(1.0, 0.0, 2.0, 0.0), 3)
    0.05
    """
    distance, reach = abs(value - bound), value - low if value > bound else high - value
    if not reach > 0:
        return math.nan if math.isnan(reach) else float(distance == 0)
    law = scipy.stats.t(draws - 1) if math.isfinite(draws) else scipy.stats.norm
    return float(2 * law.sf(law.ppf((1 + CONFIDENCE) / 2) * distance / reach))


def holm(p_values: Sequence[float]) -> np.ndarray:
    """The p-values of several tests, each raised so that all hold at once (Holm 1979); NaN are left out.

    >>> holm([0.01, 0.04, math.nan, 0.03]).tolist()
    [0.03, 0.06, nan, 0.06]
    """
    p_values = np.asarray(p_values, dtype=float)
    order = np.argsort(p_values)[: np.isfinite(p_values).sum()]
    raised = np.full(len(p_values), math.nan)
    raised[order] = np.minimum(1, np.maximum.accumulate(p_values[order] * np.arange(len(order), 0, -1)))
    return raised


def wilson(correct: int, items: int) -> tuple[float, float]:
    """The 95 % interval of a share, after Wilson (1927).

    >>> [round(bound, 3) for bound in wilson(10, 10)]
    [0.722, 1.0]
    """
    interval = scipy.stats.binomtest(correct, items).proportion_ci(CONFIDENCE, method="wilson")
    return float(interval.low), float(interval.high)


def ratio_interval(totals: Float[np.ndarray, " item"], sizes: Float[np.ndarray, " item"]) -> tuple[float, float, float]:
    """The ratio Σ totals / Σ sizes and its 95 % interval over items, by the delta method.

    >>> ratio_interval(np.array([2.0, 4.0]), np.array([1.0, 2.0]))
    (2.0, 2.0, 2.0)
    """
    ratio = totals.sum() / sizes.sum()
    residuals = totals - ratio * sizes
    half = Z_95 * math.sqrt(len(sizes) / max(len(sizes) - 1, 1) * (residuals**2).sum()) / sizes.sum()
    return float(ratio), float(ratio - half), float(ratio + half)
