"""95 % intervals: of statistics over utterances, of means over seeds, of shares, and of ratios."""

import math
from collections.abc import Iterable

import numpy as np
from jaxtyping import Float
from scipy import stats

CONFIDENCE = 0.95
Z_95 = 1.959964


def jackknife_interval(
    point: np.ndarray, left_out: np.ndarray, part: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    r"""The 95 % interval of a statistic from its values with one group of utterances left out at a time.

    With g groups and values θ_(i), the variance is (g − 1)/g · Σ (θ_(i) − mean θ)², and the interval is
    θ ± t · √variance with the 97.5 % quantile of Student's t with g − 1 degrees of freedom (Miller 1974).

    Args:
        point: the statistic on everything, of any shape.
        left_out: the statistic without each group, first axis the groups.
        part: of the same shape, whether the group has a part in the statistic; by default, every group has.

    Returns:
        Lower and upper bounds, of the shape of ``point``; NaN where fewer than two groups have a part.

    >>> low, high = jackknife_interval(np.array(2.0), np.array([2.5, 2.0, 1.5]))
    >>> round(float(high - 2), 3)
    2.484
    """
    if not len(left_out):
        return np.full_like(point, np.nan, dtype=float), np.full_like(point, np.nan, dtype=float)
    part = np.ones(left_out.shape, bool) if part is None else part
    groups = part.sum(0)
    several = np.where(groups > 1, groups, np.nan)
    mean = np.where(part, left_out, 0).sum(0) / several
    spread = np.sqrt((several - 1) / several * np.where(part, (left_out - mean) ** 2, 0).sum(0))
    reach = np.asarray(stats.t.ppf((1 + CONFIDENCE) / 2, several - 1) * spread)
    return np.asarray(point - reach), np.asarray(point + reach)


def seed_interval(values: Iterable[float]) -> tuple[float, float, float]:
    """Mean and 95 % interval of independent draws: mean ± t · s/√n with Student's t of n − 1 degrees of freedom.

    The interval of a single draw is NaN.

    >>> [round(number, 3) for number in seed_interval([1.0, 2.0, 3.0])]
    [2.0, -0.484, 4.484]
    """
    values = np.asarray([*values], dtype=float)
    if len(values) < 2:
        return float(values.mean()), math.nan, math.nan
    reach = stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1) * stats.sem(values)
    return float(values.mean()), float(values.mean() - reach), float(values.mean() + reach)


def wilson(correct: int, items: int) -> tuple[float, float]:
    """The 95 % interval of a share, after Wilson (1927).

    >>> [round(bound, 3) for bound in wilson(10, 10)]
    [0.722, 1.0]
    """
    interval = stats.binomtest(correct, items).proportion_ci(CONFIDENCE, method="wilson")
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
