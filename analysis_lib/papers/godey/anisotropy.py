"""Anisotropy of trained models, beside their untrained twins, and against drift (Godey et al. 2024, section 3)."""

import math
from collections.abc import Mapping

import numpy as np
import pandas as pd
from jaxtyping import Float
from scipy import stats

from analysis_lib.errors import AnalysisError
from analysis_lib.metrics.anisotropy import isotropic_cosine_quantile


def isotropic_excess(tables: Mapping[str, pd.DataFrame], widths: Mapping[int, int]) -> float:
    """How far the average cosine rises above what isotropy gives, in the layer where it rises farthest.

    It is the largest, over the layers, of the average cosine of the hidden states minus the 95th percentile of the
    cosine of random directions in as many dimensions (Godey et al. 2024, app. B).

    Args:
        tables: with ``anisotropy``.
        widths: dimensions of the hidden states of each layer.

    Returns:
        Above 0 where a layer lies above the percentile; at most 1 minus the percentile.
    """
    table = tables["anisotropy"]
    hidden = table[table["space"] == "hidden"]
    return (hidden["cosine"] - [isotropic_cosine_quantile(int(widths[layer])) for layer in hidden["layer"]]).max()


def training_effect(anisotropy: pd.DataFrame) -> pd.DataFrame:
    """What training adds to the anisotropy of a model: one row per model that has an untrained twin.

    The errors of model and twin are added as if they were independent, which makes the interval of their difference
    too wide where the two read the same texts.

    Args:
        anisotropy: of the hidden states; columns model, trained, layer, cosine, ci_low, ci_high.

    Returns:
        Columns model; layers, and in how many of them training makes the average cosine more and less beyond the 95 %
        interval of the difference; then, of the layer where trained and untrained differ most: layer, trained and
        untrained (average cosines), difference, ci_low and ci_high.
    """
    columns = ["model", "layer", "cosine", "ci_low", "ci_high"]
    sides = (anisotropy.loc[anisotropy["trained"] == trained, columns] for trained in (True, False))
    pairs = pd.merge(*sides, on=["model", "layer"], suffixes=("", "_of_twin"))
    pairs = pairs.rename(columns={"cosine": "trained", "cosine_of_twin": "untrained"})
    difference = pairs["trained"] - pairs["untrained"]
    # Student's t of both is that of as many groups: half-widths add like standard errors.
    reach = np.hypot(pairs["ci_high"] - pairs["ci_low"], pairs["ci_high_of_twin"] - pairs["ci_low_of_twin"]) / 2
    pairs = pairs.assign(difference=difference, ci_low=difference - reach, ci_high=difference + reach)
    pairs = pairs.assign(more=pairs["ci_low"] > 0, less=pairs["ci_high"] <= 0)
    counts = pairs.groupby("model", sort=False).agg(
        layers=("layer", "size"), more=("more", "sum"), less=("less", "sum")
    )
    most = pairs.loc[difference.abs().groupby(pairs["model"], sort=False).idxmax()]
    greatest = most[["model", "layer", "trained", "untrained", "difference", "ci_low", "ci_high"]]
    return counts.reset_index().merge(greatest, on="model")


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
    names = ["model", "layers", "spearman", "spearman_p", "pearson", "pearson_p", "enough", "note"]
    return pd.DataFrame([_correlate(*group) for group in table.groupby("model", sort=False)], columns=names)


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
