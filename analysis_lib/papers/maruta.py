"""Maruta and Matsuzaki (2024): outlier dimensions decide where attention goes."""

import math

import pandas as pd

from analysis_lib.measurement import TableSet
from analysis_lib.metrics.dimensions import THRESHOLD, magnitude_zscores
from analysis_lib.models import TOKEN_TYPES

# Types of tokens as a reader would write them, for legends and sentences: ``.cat.rename_categories(maruta.NAMES)``.
NAMES = {
    "cls": "[CLS]",
    "sep": "[SEP]",
    "first": "first token",
    "punct": "punctuation",
    "other": "other tokens",
    "all": "all tokens",
}


def named_layers(depth: int) -> dict[str, list[int]]:
    """The layers that the paper calls early, middle and last: of 12 layers 2 and 3, 5 to 10, 11 and 12.

    In a model of another depth they are those at the same relative depth; a part may be empty.

    >>> named_layers(6)
    {'early': [2], 'middle': [3, 4, 5], 'last': [6]}
    """
    start, end = math.ceil(5 * depth / 12), math.floor(10 * depth / 12)
    early = range(2, max(2, round(depth / 4)) + 1)
    return {"early": [*early], "middle": [*range(start, end + 1)], "last": [*range(end + 1, depth + 1)]}


def mean_over(values: pd.Series, part: str) -> float:
    """The mean of a number per attention layer over a part of :func:`named_layers`; NaN where no layer has one."""
    return float(values.reindex(named_layers(int(values.index.max()))[part]).mean())


# --- Dimensions ---------------------------------------------------------------------------------------


def overall_means(tables: TableSet) -> pd.DataFrame:
    """Mean of each dimension over all tokens: one row per hidden layer, one column per dimension."""
    means = tables["dimension_means"]
    return means[means["token_type"] == "all"].pivot(index="layer", columns="dimension", values="mean")


def zscores(means: pd.DataFrame) -> pd.DataFrame:
    """How far each |mean| lies above the average of its row, in standard deviations; an outlier lies above 3."""
    return means.apply(magnitude_zscores, axis=1, raw=True)


# --- Attention by type of token -----------------------------------------------------------------------


def weights_in(tables: TableSet, part: str | None = None) -> pd.DataFrame:
    """Mean weight per key over the heads, in a part of :func:`named_layers`.

    Args:
        tables: with ``attention_by_token_type``.
        part: early, middle or last; all layers unless given.

    Returns:
        One row per attention layer, one column per type of key: a weight in [0, 1], NaN where there is no such key.
    """
    weights = tables["attention_by_token_type"].pivot_table("weight", "layer", "key_type", aggfunc="mean")
    weights = weights.reindex(columns=TOKEN_TYPES)
    return weights if part is None else weights.reindex(named_layers(int(weights.index.max()))[part])


def weight_margin(tables: TableSet, part: str, key_type: str) -> float:
    """The least margin of a type's mean weight per key over the best other type, over the layers of a part.

    Args:
        tables, part: as for :func:`weights_in`.
        key_type: any but other.

    Returns:
        In [-1, 1]; NaN where the model has no such key.
    """
    weights = weights_in(tables, part)
    return (weights[key_type] - weights.drop(columns=key_type).max(axis=1)).min()


# --- Contributions to the scores ----------------------------------------------------------------------


def _outliers_read(tables: TableSet, threshold: float, typed: bool = False) -> pd.MultiIndex:
    """The pairs of an attention layer and a dimension of its input that is an outlier, or one for some token type."""
    means = tables["dimension_means"].query(f"token_type {'!=' if typed else '=='} 'all'")
    wide = means.pivot(index=["layer", "token_type"], columns="dimension", values="mean")
    outlying = (zscores(wide) > threshold).groupby("layer").any().rename(index=lambda layer: layer + 1).stack()
    return outlying.index[outlying]


def outlier_part(tables: TableSet) -> pd.DataFrame:
    """How much the outlier dimensions of its input contribute to the scores of each attention layer.

    Args:
        tables: with ``score_contributions`` and ``dimension_means``.

    Returns:
        By layer: heads, the share of heads whose largest |C_j| is that of an outlier dimension; and share, that of
        Σ_j |C_j| which outlier dimensions add, mean over heads.
    """
    overall = tables["score_contributions"].query("key_type == 'all'").set_index(["layer", "dimension", "head"])
    sizes = overall["contribution"].abs()
    outlying = sizes.where(sizes.index.droplevel("head").isin(_outliers_read(tables, THRESHOLD)), 0.0)
    theirs, whole = (part.groupby(["layer", "head"]).agg(["max", "sum"]) for part in (outlying, sizes))
    by_head = pd.DataFrame({"heads": theirs["max"] == whole["max"], "share": theirs["sum"] / whole["sum"]})
    return by_head.groupby("layer").mean()


def explained_gap(
    tables: TableSet, rival: str = "other", preferred: str | None = None, threshold: float = THRESHOLD
) -> pd.DataFrame:
    """How much of the score that favours a layer's preferred type of key the outlier dimensions explain.

    For each attention layer, the preferred type is the one with the largest mean weight per key, other tokens left out,
    unless one is named. Its gap to a rival type is Σ_j (C_j of its keys − C_j of the rival's), mean over heads: how
    much higher the scores of its keys are. A share is what some dimensions add to the gap, over the gap.

    Args:
        tables: with ``score_contributions``, ``dimension_means`` and ``attention_by_token_type``.
        rival: ``other``, or ``runner-up``: the type with the second largest mean weight.
        preferred: a type of key to take in every layer.
        threshold: of the z-score from which a dimension is an outlier; 3 in the paper.

    Returns:
        Columns layer, key_type (the preferred), rival, gap (before scaling), share (of the outlier dimensions of
        the layer's input), typed_share (of those that are outliers for some token type), largest_dimension (the one
        that adds most) and largest_share. A share above 1 means that the rest works against it; where the gap is
        not positive there is no share (NaN).
    """
    by_type = tables["score_contributions"].groupby(["layer", "dimension", "key_type"], observed=False)
    means = by_type["contribution"].mean().unstack().reindex(columns=TOKEN_TYPES)
    for name, typed in (("outlier", False), ("typed", True)):
        means[name] = means.index.isin(_outliers_read(tables, threshold, typed))
    rows = []
    for layer, weight in weights_in(tables).iterrows():
        key_type = preferred or weight.drop("other").idxmax()
        against = weight.drop(key_type).idxmax() if rival == "runner-up" else rival
        part = means.loc[layer]
        gap = part[key_type] - part[against]
        shares = pd.Series([gap[part["outlier"]].sum(), gap[part["typed"]].sum(), gap.max()])
        shares /= gap.sum() if gap.sum() > 0 else math.nan
        rows.append((layer, key_type, against, gap.sum(), *shares[:2], gap.idxmax(), shares[2]))
    names = ["layer", "key_type", "rival", "gap", "share", "typed_share", "largest_dimension", "largest_share"]
    return pd.DataFrame(rows, columns=names)
