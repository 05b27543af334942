"""Maruta and Matsuzaki (2024): outlier dimensions and attention."""

import math
from collections.abc import Callable, Mapping

import pandas as pd

from analysis_lib.measurement import Tables
from analysis_lib.metrics.outlier_dimensions import THRESHOLD, magnitude_zscores
from analysis_lib.models import TOKEN_TYPES
from analysis_lib.papers.claims import early_layers, late_layers, middle_layers, published

TableSet = Mapping[str, pd.DataFrame]
Layers = Callable[[int], list[int]]


def tested_layers(depth: int) -> str:
    """The layers that the claims call early, middle and last in a model of this depth, in words."""
    parts = {"early": early_layers(depth), "middle": middle_layers(depth), "last": late_layers(depth)}
    return "; ".join(f"{name} {', '.join(map(str, layers)) or '–'}" for name, layers in parts.items())


# --- Dimensions ---------------------------------------------------------------------------------------


def _means(tables: TableSet) -> pd.DataFrame:
    """Mean of each dimension over all tokens: one row per layer, one column per dimension."""
    means = tables["dimension_means"]
    return means[means["token_type"] == "all"].pivot(index="layer", columns="dimension", values="mean")


def _zscores(means: pd.DataFrame) -> pd.DataFrame:
    return means.apply(magnitude_zscores, axis=1, raw=True)


def persistent_zscore(tables: TableSet) -> float:
    """The least z-score of |mean| over the layers, of the dimension where it is largest.

    The embedding output is left out: the claim is about the outputs of the layers.

    Args:
        tables: with ``dimension_means``.

    Returns:
        Above 3 where one dimension is an outlier in every layer.
    """
    return _zscores(_means(tables).drop(index=0)).min().max()


def type_distance(tables: TableSet) -> float:
    """How far some type's mean lies from that of other tokens, in each layer's leading outlier dimension.

    The type is the farthest of cls, sep and punct, and the layer the one where its distance is least; the embedding
    output is left out.

    Args:
        tables: with ``dimension_means`` and ``outlier_dimensions``.

    Returns:
        In standard deviations of the layer's |means|, as the z-score of an outlier dimension is; NaN where no layer
        has an outlier dimension.
    """
    outliers = tables["outlier_dimensions"]
    leading = outliers[outliers["layer"] > 0].groupby("layer").head(1)[["layer", "dimension"]]
    if leading.empty:
        return math.nan
    values = tables["dimension_means"].merge(leading).pivot(index="layer", columns="token_type", values="mean")
    values = values.reindex(columns=TOKEN_TYPES)
    distance = values.drop(columns="other").sub(values["other"], axis=0).abs().max(axis=1)
    spread = _means(tables).abs().std(axis=1, ddof=0)
    return (distance / spread).min()


# --- Attention by type of token -----------------------------------------------------------------------


def _weights(tables: TableSet) -> pd.DataFrame:
    """Mean weight per key over the heads: one row per attention layer, one column per type of key."""
    return tables["attention_by_token_type"].pivot_table("weight", "layer", "key_type", aggfunc="mean")


def weight_margin(tables: TableSet, layers: Layers, key_type: str) -> float:
    """The least margin, over some layers, of a type's mean weight per key over the best other type.

    Args:
        tables: with ``attention_by_token_type``.
        layers: gives the layers for the depth of the model, as ``claims.early_layers`` does.
        key_type: cls, sep or punct.

    Returns:
        In [-1, 1]; NaN where the model has no such key.
    """
    weights = _weights(tables)
    # reindex: a shallow model may lack such a layer, and the claim is then undecided.
    chosen = weights.reindex(layers(int(weights.index.max())))
    if key_type not in chosen:
        return math.nan
    return (chosen[key_type] - chosen.drop(columns=key_type).max(axis=1)).min()


def late_rise(tables: TableSet) -> float:
    """The least mean weight of a comma or full stop in the last layers, over its largest in the middle layers.

    Args:
        tables: with ``attention_by_token_type``.

    Returns:
        A ratio, 0 or more; NaN where the model sees no punctuation.
    """
    weights = _weights(tables)
    if "punct" not in weights:
        return math.nan
    depth = int(weights.index.max())
    return weights["punct"].reindex(late_layers(depth)).min() / weights["punct"].reindex(middle_layers(depth)).max()


# --- Contributions to the scores ----------------------------------------------------------------------


def _mean_over(layers: Layers, values: pd.Series) -> float:
    """The mean over the layers for the depth of the model; layers without a value are left out."""
    return float(values.reindex(layers(int(values.index.max()))).mean())


def _outliers_read(tables: TableSet) -> pd.MultiIndex:
    """The pairs of an attention layer and an outlier dimension of the hidden layer that it reads."""
    outliers = tables["outlier_dimensions"]
    return pd.MultiIndex.from_arrays([outliers["layer"] + 1, outliers["dimension"]], names=["layer", "dimension"])


def _overall(tables: TableSet) -> pd.DataFrame:
    """The contributions over all keys, by attention layer and dimension."""
    contributions = tables["score_contributions"]
    return contributions[contributions["key_type"] == "all"].set_index(["layer", "dimension"])


def dominated_heads(tables: TableSet) -> pd.Series:
    """By attention layer, the share of heads whose largest |C_j| is that of an outlier dimension of their input."""
    sizes = _overall(tables).set_index("head", append=True)["contribution"].abs()
    largest = pd.MultiIndex.from_tuples(sizes.groupby(["layer", "head"]).idxmax(), names=sizes.index.names)
    hit = largest.droplevel("head").isin(_outliers_read(tables))
    return pd.Series(hit, index=largest).groupby("layer").mean()


def dominated_share(tables: TableSet, layers: Layers) -> float:
    """The mean of :func:`dominated_heads` over some layers, in [0, 1].

    Args:
        tables: with ``score_contributions`` and ``outlier_dimensions``.
        layers: gives the layers for the depth of the model, as ``claims.middle_layers`` does.
    """
    return _mean_over(layers, dominated_heads(tables))


def outlier_share(tables: TableSet) -> pd.Series:
    """By attention layer, the share of Σ_j |C_j| that outlier dimensions of its input add, mean over heads."""
    sizes = _overall(tables).assign(size=lambda t: t["contribution"].abs())
    sizes["outlying"] = sizes["size"].where(sizes.index.isin(_outliers_read(tables)), 0.0)
    by_head = sizes.groupby(["layer", "head"])[["size", "outlying"]].sum()
    return (by_head["outlying"] / by_head["size"]).groupby("layer").mean()


def growth_after_layer_1(tables: TableSet) -> float:
    """The mean of :func:`outlier_share` over the middle layers, minus that of layer 1; in [-1, 1].

    Args:
        tables: with ``score_contributions`` and ``outlier_dimensions``.
    """
    share = outlier_share(tables)
    return _mean_over(middle_layers, share) - share[1]


def _typed_outliers_read(tables: TableSet) -> pd.MultiIndex:
    """Like :func:`_outliers_read`, of dimensions that are outliers in the means of any one token type."""
    means = tables["dimension_means"]
    wide = means[means["token_type"] != "all"].pivot(index=["layer", "token_type"], columns="dimension", values="mean")
    outlying = (_zscores(wide) > THRESHOLD).groupby("layer").any().rename(index=lambda layer: layer + 1).stack()
    return outlying.index[outlying]


def explained_gap(tables: TableSet, rival: str = "other") -> pd.DataFrame:
    """How much of the score that favours a layer's preferred type of key the outlier dimensions explain.

    For each attention layer, the preferred type is the one with the largest mean weight per key, among cls, sep and
    punct. Its gap to a rival type is Σ_j (C_j of its keys − C_j of the rival's), mean over heads: how much higher the
    scores of its keys are. A share is what some dimensions add to the gap, over the gap.

    Args:
        tables: with ``score_contributions``, ``outlier_dimensions``, ``dimension_means``, ``attention_by_token_type``.
        rival: ``other``, or ``runner-up``: the type with the second largest mean weight.

    Returns:
        Columns layer, key_type (the preferred), rival, gap (before scaling), share (of the outlier dimensions of
        the layer's input), typed_share (of those that are outliers for some token type), largest_dimension (the one
        that adds most) and largest_share. A share above 1 means that the rest works against it; where the gap is
        not positive there is no share (NaN).
    """
    by_type = tables["score_contributions"].groupby(["layer", "dimension", "key_type"], observed=False)
    means = by_type["contribution"].mean().unstack().reindex(columns=TOKEN_TYPES)
    outliers = [means.index.isin(found) for found in (_outliers_read(tables), _typed_outliers_read(tables))]
    rows = []
    for layer, weight in _weights(tables).iterrows():
        preferred = weight.drop("other", errors="ignore").idxmax()
        against = weight.drop(preferred).idxmax() if rival == "runner-up" else rival
        gap = means[preferred] - means[against]
        total = gap[layer].sum() if gap[layer].sum() > 0 else math.nan
        shares = [gap.where(found, 0.0)[layer].sum() / total for found in outliers]
        largest = gap[layer].idxmax()
        rows.append((layer, preferred, against, gap[layer].sum(), *shares, largest, gap[layer][largest] / total))
    names = ["layer", "key_type", "rival", "gap", "share", "typed_share", "largest_dimension", "largest_share"]
    return pd.DataFrame(rows, columns=names)


def explained_share(tables: TableSet, layers: Layers, rival: str = "other") -> float:
    """The mean over some layers of the share of the gap that outlier dimensions add (:func:`explained_gap`).

    Args:
        tables: as of :func:`explained_gap`.
        layers: gives the layers for the depth of the model, as ``claims.middle_layers`` does.
        rival: as of :func:`explained_gap`.

    Returns:
        1 where outlier dimensions add the whole gap; NaN where no layer has a gap.
    """
    return _mean_over(layers, explained_gap(tables, rival).set_index("layer")["share"])


# --- Published numbers --------------------------------------------------------------------------------


def is_published_model(tables: Tables) -> bool:
    """Whether the measured model is the BERT-base of the paper's Table 1."""
    return str(tables.run["model_revision"]).startswith("google-bert/bert-base-uncased@")


def compare_table1(tables: TableSet) -> pd.DataFrame:
    """The paper's Table 1 beside ours, in its order: columns layer, dimension, key_type, head, published, ours."""
    paper = published("maruta_table1_contributions").rename(columns={"mean_contribution": "published"})
    ours = tables["score_contributions"].rename(columns={"contribution": "ours"}).drop(columns="pairs")
    # A categorical and an integer with missing values do not join with the plain columns of the file.
    ours = ours.astype({"key_type": str, "head": int})
    return paper.merge(ours, how="left", on=["layer", "dimension", "key_type", "head"])
