"""Maruta and Matsuzaki (2024): outlier dimensions and attention."""

import math
from collections.abc import Callable, Iterable

import numpy as np
import pandas as pd

from analysis_lib.measurement.measuring import Tables
from analysis_lib.metrics.attention_by_token_type import by_layer
from analysis_lib.metrics.outlier_dimensions import THRESHOLD, magnitude_zscores
from analysis_lib.models.loading import TOKEN_TYPES
from analysis_lib.papers.claims import Claim, TableSet, early_layers, late_layers, middle_layers, published


def _all_tokens(tables: TableSet) -> pd.DataFrame:
    """Mean of each dimension over all tokens: one row per layer, one column per dimension."""
    means = tables["dimension_means"]
    return means[means["token_type"] == "all"].pivot(index="layer", columns="dimension", values="mean")


def _least_zscore(tables: TableSet) -> float:
    # Layer 0 is the embedding: the claim is about the outputs of the layers.
    zscores = _all_tokens(tables).drop(index=0).apply(lambda row: pd.Series(magnitude_zscores(row.to_numpy())), axis=1)
    return zscores.min().max()


def _farthest_type(tables: TableSet) -> float:
    """How far a type's mean lies from that of other tokens, in the leading outlier dimension where it is least.

    The unit is the standard deviation of the layer's |means|, as in the z-score of an outlier dimension.
    """
    outliers = tables["outlier_dimensions"]
    leading = outliers[outliers["layer"] > 0].groupby("layer").head(1)[["layer", "dimension"]]
    if leading.empty:
        return math.nan
    values = tables["dimension_means"].merge(leading).pivot(index="layer", columns="token_type", values="mean")
    values = values.reindex(columns=TOKEN_TYPES)
    distance = values.drop(columns="other").sub(values["other"], axis=0).abs().max(axis=1)
    spread = _all_tokens(tables).abs().std(axis=1, ddof=0)
    return (distance / spread).min()


def _weights(tables: TableSet) -> pd.DataFrame:
    """Mean weight per key: one row per attention layer, one column per type of key."""
    layers = by_layer(tables["attention_by_token_type"])
    return layers.pivot(index="layer", columns="key_type", values="weight")


def _weight_margin(layers: Callable[[int], list[int]], key_type: str) -> Callable[[TableSet], float]:
    """The least margin, over the layers, of a type's mean weight per key over the best other type."""

    def statistic(tables: TableSet) -> float:
        weights = _weights(tables)
        # reindex: a shallow model may lack such a layer, and the claim is then undecided.
        chosen = weights.reindex(layers(int(weights.index.max())))
        if key_type not in chosen:
            return math.nan
        return (chosen[key_type] - chosen.drop(columns=key_type).max(axis=1)).min()

    return statistic


def _late_rise(tables: TableSet) -> float:
    weights = _weights(tables)
    if "punct" not in weights:
        return math.nan
    depth = int(weights.index.max())
    return weights["punct"].reindex(late_layers(depth)).min() / weights["punct"].reindex(middle_layers(depth)).max()


def _outliers_by_layer(tables: TableSet) -> dict[int, list[int]]:
    """The outlier dimensions of the hidden layer that each attention layer reads."""
    outliers = tables["outlier_dimensions"]
    return {layer + 1: group["dimension"].tolist() for layer, group in outliers.groupby("layer")}


def _depth(tables: TableSet) -> int:
    return int(tables["score_contributions"]["layer"].max())


def dominated_heads(tables: TableSet) -> pd.Series:
    """By attention layer, the share of heads whose largest |C_j| is that of an outlier dimension of their input."""
    table = tables["score_contributions"]
    overall = table[table["key_type"] == "all"]
    largest = overall.loc[overall["contribution"].abs().groupby([overall["layer"], overall["head"]]).idxmax()]
    outliers = _outliers_by_layer(tables)
    hit = [d in outliers.get(layer, []) for layer, d in zip(largest["layer"], largest["dimension"], strict=True)]
    return largest.assign(hit=hit).groupby("layer")["hit"].mean()


def outlier_share(tables: TableSet) -> pd.Series:
    """By attention layer, the share of Σ_j |C_j| that comes from outlier dimensions of its input, mean over heads."""
    table = tables["score_contributions"]
    sizes = table[table["key_type"] == "all"].assign(size=lambda t: t["contribution"].abs())
    pairs = pd.MultiIndex.from_frame(sizes[["layer", "dimension"]])
    found = [(layer, d) for layer, dimensions in _outliers_by_layer(tables).items() for d in dimensions]
    sizes["outlying"] = sizes["size"].where(pairs.isin(found), 0.0)
    by_head = sizes.groupby(["layer", "head"])[["size", "outlying"]].sum()
    return (by_head["outlying"] / by_head["size"]).groupby("layer").mean()


def _typed_outliers(tables: TableSet) -> dict[int, list[int]]:
    """Like the outlier dimensions of each attention layer's input, found in the means of any one token type."""
    means = tables["dimension_means"]
    wide = means[means["token_type"] != "all"].pivot(index=["layer", "token_type"], columns="dimension", values="mean")
    found: dict[int, set[int]] = {}
    for (layer, _), row in wide.iterrows():
        found.setdefault(layer + 1, set()).update(
            np.flatnonzero(magnitude_zscores(row.to_numpy()) > THRESHOLD).tolist()
        )
    return {layer: sorted(dimensions) for layer, dimensions in found.items()}


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
    weights = _weights(tables)
    by_type = tables["score_contributions"].groupby(["layer", "dimension", "key_type"], observed=False)
    means = by_type["contribution"].mean().unstack().reindex(columns=TOKEN_TYPES)
    outliers, typed = _outliers_by_layer(tables), _typed_outliers(tables)
    rows = []
    for layer, weight in weights.iterrows():
        preferred = weight.drop("other", errors="ignore").idxmax()
        against = weight.drop(preferred).idxmax() if rival == "runner-up" else rival
        gap = means.loc[layer, preferred] - means.loc[layer, against]
        total = gap.sum() if gap.sum() > 0 else math.nan
        shares = [gap.reindex(found.get(layer, [])).sum() / total for found in (outliers, typed)]
        largest = gap.idxmax()
        rows.append((layer, preferred, against, gap.sum(), *shares, largest, gap[largest] / total))
    names = ["layer", "key_type", "rival", "gap", "share", "typed_share", "largest_dimension", "largest_share"]
    return pd.DataFrame(rows, columns=names)


def _mean_over(layers: Callable[[int], list[int]], values: Callable[[TableSet], pd.Series]):
    def statistic(tables: TableSet) -> float:
        return float(values(tables).reindex(layers(_depth(tables))).mean())

    return statistic


def _gap_share(rival: str) -> Callable[[TableSet], pd.Series]:
    return lambda tables: explained_gap(tables, rival).set_index("layer")["share"]


def _early_remainder(tables: TableSet) -> float:
    return 1 - _mean_over(early_layers, _gap_share("runner-up"))(tables)


def _growth_after_layer_1(tables: TableSet) -> float:
    share = outlier_share(tables)
    return float(share.reindex(middle_layers(_depth(tables))).mean() - share[1])


_MARUTA = "Maruta and Matsuzaki 2024"

MARUTA_DIMENSIONS = [
    Claim(
        f"{_MARUTA}, sec. 2.1",
        "One dimension is an outlier in every layer.",
        "z-score of |mean| of the best such dimension in the layer where it is least",
        _least_zscore,
        ("dimension_means",),
        bound=3.0,
    ),
    Claim(
        f"{_MARUTA}, sec. 3",
        "In an outlier dimension, some of [CLS], [SEP] and punctuation lie far from the other tokens.",
        "distance of the farthest type's mean from that of other tokens, in standard deviations of the layer's "
        "|means|, in the leading outlier dimension, layer where it is least",
        _farthest_type,
        ("dimension_means", "outlier_dimensions"),
        bound=3.0,
    ),
]

MARUTA_ATTENTION = [
    Claim(
        f"{_MARUTA}, sec. 2.2",
        "In early layers (2 and 3 of 12), a [CLS] key receives the largest weight.",
        "mean weight of a [CLS] key minus that of the type with the next largest, least over these layers",
        _weight_margin(early_layers, "cls"),
        ("attention_by_token_type",),
    ),
    Claim(
        f"{_MARUTA}, sec. 2.2",
        "In middle layers (5 to 10 of 12), a [SEP] key receives the largest weight.",
        "mean weight of a [SEP] key minus that of the type with the next largest, least over these layers",
        _weight_margin(middle_layers, "sep"),
        ("attention_by_token_type",),
    ),
    Claim(
        f"{_MARUTA}, sec. 2.2",
        "In the last layers (11 and 12 of 12), the weight of commas and full stops rises sharply.",
        "least mean weight of such a key in these layers over its largest in the middle layers",
        _late_rise,
        ("attention_by_token_type",),
        bound=1.5,
    ),
]

_CONTRIBUTION_TABLES = ("score_contributions", "outlier_dimensions", "dimension_means", "attention_by_token_type")
_GAP = "share of the score gap between the preferred type of key and other keys that outlier dimensions add"

MARUTA_CONTRIBUTIONS = [
    Claim(
        f"{_MARUTA}, app. A",
        "In layer 1 no dimension dominates the scores yet.",
        "share of Σ|C_j| that comes from outlier dimensions, mean over the middle layers minus that in layer 1",
        _growth_after_layer_1,
        _CONTRIBUTION_TABLES[:2],
        limits=(-1.0, 1.0),
    ),
    Claim(
        f"{_MARUTA}, sec. 4.3",
        "In middle layers, outlier dimensions dominate the scores of nearly all heads.",
        "share of heads whose largest |C_j| is that of an outlier dimension, mean over these layers",
        _mean_over(middle_layers, dominated_heads),
        _CONTRIBUTION_TABLES[:2],
        bound=0.9,
        limits=(0.0, 1.0),
    ),
    Claim(
        f"{_MARUTA}, sec. 4.3",
        "In early layers, the outlier dimensions alone do not explain where attention gathers.",
        "1 minus the share of the score gap between the preferred type of key and the runner-up that outlier "
        "dimensions add, mean over these layers",
        _early_remainder,
        _CONTRIBUTION_TABLES,
        bound=0.5,
    ),
    Claim(
        f"{_MARUTA}, sec. 4.3",
        "In middle layers, the outlier dimensions explain where attention gathers ([SEP] in BERT-base).",
        f"{_GAP}, mean over these layers",
        _mean_over(middle_layers, _gap_share("other")),
        _CONTRIBUTION_TABLES,
        bound=0.5,
    ),
    Claim(
        f"{_MARUTA}, sec. 4.3",
        "In the last layers, the outlier dimensions explain where attention gathers ([SEP], punctuation in BERT-base).",
        f"{_GAP}, mean over these layers",
        _mean_over(late_layers, _gap_share("other")),
        _CONTRIBUTION_TABLES,
        bound=0.5,
    ),
]


def tested_layers(depth: int) -> str:
    """The layers that the claims call early, middle and last in a model of this depth, in words."""
    parts = {"early": early_layers(depth), "middle": middle_layers(depth), "last": late_layers(depth)}
    return "; ".join(f"{name} {', '.join(map(str, layers)) or '–'}" for name, layers in parts.items())


def contributions_by_key_type(tables: TableSet, layers: Iterable[int], dimensions_per_layer: int = 2) -> pd.DataFrame:
    """Mean C_j per type of key and head, as in Table 1: the leading outlier dimensions of each layer's input.

    Returns:
        Columns layer, dimension, key_type, then one per head: 1, 2, ... No row where the layers read no
        outlier dimension.
    """
    outliers = _outliers_by_layer(tables)
    table = tables["score_contributions"]
    chosen = [(layer, d) for layer in layers for d in outliers.get(layer, [])[:dimensions_per_layer]]
    keys = ["layer", "dimension", "key_type"]
    if not chosen:
        return pd.DataFrame(columns=keys)
    rows = table[table["key_type"] != "all"].merge(pd.DataFrame(chosen, columns=keys[:2]))
    wide = rows.pivot(index=keys, columns="head", values="contribution").rename(columns=str)
    order = [(layer, d, kind) for layer, d in chosen for kind in TOKEN_TYPES]
    return wide.loc[[key for key in order if key in wide.index]].reset_index().rename_axis(columns=None)


def is_published_model(tables: Tables) -> bool:
    """Whether the measured model is the BERT-base of the paper's Table 1."""
    return str(tables.run["model_revision"]).startswith("google-bert/bert-base-uncased@")


def compare_table1(tables: TableSet) -> pd.DataFrame:
    """The paper's Table 1 beside ours: columns layer, dimension, key_type, head, published, ours, difference."""
    paper = published("maruta_table1_contributions").rename(columns={"mean_contribution": "published"})
    ours = tables["score_contributions"].rename(columns={"contribution": "ours"})
    # A categorical and an integer with missing values do not join with the plain columns of the file.
    ours = ours.assign(key_type=ours["key_type"].astype(str), head=ours["head"].astype(int))
    both = paper.merge(ours.drop(columns="pairs"), how="left", on=["layer", "dimension", "key_type", "head"])
    return both.assign(difference=both["ours"] - both["published"])


def agreement(comparison: pd.DataFrame) -> dict[str, float]:
    """How well two columns of numbers agree: Pearson correlation and the median and largest absolute difference."""
    difference = comparison["difference"].abs()
    return {
        "correlation": float(np.corrcoef(comparison["published"], comparison["ours"])[0, 1]),
        "median_difference": float(difference.median()),
        "largest_difference": float(difference.max()),
    }
