"""Drift against anisotropy: does a layer's mean vector explain how alike its tokens are?"""

import math

import numpy as np
import pandas as pd
from jaxtyping import Float
from scipy import stats

from analysis_lib.errors import AnalysisError

SIGNIFICANCE = 0.05
# 9! is 362,880 orders; of more layers, Student's t is near enough.
MOST_ENUMERATED = 9


def permutation_p(x: Float[np.ndarray, " layer"], y: Float[np.ndarray, " layer"]) -> float:
    """The two-sided p-value of a correlation over all n! orders: the share with one as strong or stronger.

    Args:
        x, y: values, or their ranks for Spearman's correlation; n of each, at most 9.

    >>> round(permutation_p(np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.0, 3.0])), 6)  # 2 of 6 orders
    0.333333
    """

    def strength(order: np.ndarray, axis: int) -> np.ndarray:
        return np.abs((order * (y - y.mean())).sum(axis))

    # Of strengths, "greater" counts both signs: where ranks are tied, scipy's "two-sided" doubles one tail instead.
    settings = {"permutation_type": "pairings", "alternative": "greater", "n_resamples": np.inf, "vectorized": True}
    return float(stats.permutation_test((x,), strength, **settings).pvalue)


def drift_correlation(table: pd.DataFrame) -> pd.DataFrame:
    """Whether the average cosine follows the norm of the mean vector over the layers of each model.

    Spearman's correlation of the ranks and Pearson's of the values, with two-sided p-values (Godey et al. 2024,
    sec. 3.3 and app. A). The p of Spearman is exact, over all orders, up to 9 layers, and from Student's t above; that
    of Pearson takes the values for normal. Both take the layers for independent, which neighbours are not: read them
    as the paper's measure, not as proof.

    Args:
        table: columns model, layer, norm_of_mean, cosine; one row per layer.

    Returns:
        One row per model: model, layers (how many), spearman, spearman_p, pearson, pearson_p, enough (whether so few
        layers can give p < 0.05 at all: Spearman's is 2/n! or more) and note, which says how the p of Spearman was
        computed, or why there is none. A constant has no correlation: NaN.

    Raises:
        AnalysisError: a value is missing.
    """
    rows = [_correlate(model, layers) for model, layers in table.groupby("model", sort=False)]
    names = ["model", "layers", "spearman", "spearman_p", "pearson", "pearson_p", "enough", "note"]
    return pd.DataFrame(rows, columns=names)


def _correlate(model: str, table: pd.DataFrame) -> tuple:
    norm, cosine = (table[column].to_numpy(float) for column in ("norm_of_mean", "cosine"))
    if not np.isfinite([norm, cosine]).all():
        layer = table["layer"].iloc[np.argmin(np.isfinite(norm) & np.isfinite(cosine))]
        raise AnalysisError(f"{model} has no finite drift and cosine in layer {layer}: leave that layer out")
    layers = len(table)
    enough = 2 / math.factorial(layers) < SIGNIFICANCE
    constant = [name for name, values in (("drift", norm), ("cosine", cosine)) if np.ptp(values) == 0]
    if layers < 3 or constant:
        note = f"the {constant[0]} is the same in every layer" if constant and layers > 1 else "too few layers to say"
        return model, layers, *[math.nan] * 4, enough, note
    spearman, pearson = stats.spearmanr(norm, cosine), stats.pearsonr(norm, cosine)
    if layers <= MOST_ENUMERATED:
        spearman_p = permutation_p(stats.rankdata(norm), stats.rankdata(cosine))
        note = f"p over all {math.factorial(layers):,} orders" if enough else "too few layers to say"
    else:
        spearman_p, note = spearman.pvalue, "p from Student's t"
    return model, layers, spearman.statistic, spearman_p, pearson.statistic, pearson.pvalue, enough, note
