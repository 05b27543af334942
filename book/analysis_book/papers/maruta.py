"""Maruta and Matsuzaki (2024): outlier dimensions decide where attention goes."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis_book.papers.counts import exact
from analysis_lib.errors import AnalysisError
from analysis_lib.measurement import Chosen, Ratio, TableSet
from analysis_lib.metrics.dimensions import THRESHOLD, magnitude_zscores
from analysis_lib.metrics.intervals import Estimate
from analysis_lib.models import TOKEN_TYPES


def named_layers(depth: int) -> dict[str, list[int]]:
    """The layers that the paper calls early, middle and last.

    Of 12 layers these are 2 and 3, 5 to 10, 11 and 12. In a model of another depth they are those
    at the same relative depth; a part may be empty.

    Raises:
        AnalysisError: one layer is none of them.

    >>> named_layers(6)
    {'early': [2], 'middle': [3, 4, 5], 'last': [6]}
    """
    if depth < 2:
        raise AnalysisError(
            "one layer is neither early, middle nor last: give a model of two layers or more"
        )
    start = math.ceil(5 * depth / 12)
    end = math.floor(10 * depth / 12)
    last_early = max(2, round(depth / 4))
    return {
        "early": [*range(2, min(last_early + 1, start))],
        "middle": [*range(start, end + 1)],
        "last": [*range(end + 1, depth + 1)],
    }


def leads(values: pd.DataFrame, types: Iterable[str]) -> pd.DataFrame:
    """By how much each of some types of token exceeds each of the others.

    Args:
        values: one column per type; of types that do not occur, NaN.
        types: those that should be larger.

    Returns:
        The same rows, and a column for each pair of one of the types and another; NaN where the
        former does not occur.
    """
    rest = values.drop(columns=[*types])
    rest = rest.dropna(axis=1, how="all")
    excess = {key_type: rest.rsub(values[key_type], axis=0) for key_type in types}
    return pd.concat(excess, axis=1)


# --- Dimensions
# ---------------------------------------------------------------------------------------


def overall_means(tables: TableSet) -> pd.DataFrame:
    """Mean over all tokens of each dimension (columns) in each hidden layer (rows)."""
    means = tables["dimension_means"]
    means = means[means["token_type"] == "all"]
    return means.pivot(index="layer", columns="dimension", values="mean")


def zscores(means: pd.DataFrame) -> pd.DataFrame:
    """How many standard deviations each |mean| lies above the average of its row.

    An outlier lies above 3.
    """
    return means.apply(magnitude_zscores, axis=1, raw=True)


def role_margins(tables: TableSet, role: str) -> pd.DataFrame:
    """How far each dimension is from breaking the pattern of one that the paper follows.

    ``leading`` is an outlier in the first two thirds of the layers, as dimension 308 of BERT-base;
    ``middle`` in the middle layers and in none of those before the fourth of twelve, as 381;
    ``late`` in the last layers and in none of the first two thirds, as 180. Layer 0, the
    embeddings, is left open.

    Returns:
        One row per layer that the role speaks of, one column per dimension: how far its z-score
        lies on the right side of 3. A dimension has the role if all its numbers are above zero.
    """
    above = zscores(overall_means(tables)).drop(index=0) - THRESHOLD
    named = named_layers(above.index.max())
    thirds = above.index[above.index <= two_thirds(tables)]
    last_early = max(named["early"], default=1)
    before_middle = range(1, min(last_early + 1, named["middle"][0]))
    inside = {
        "leading": thirds,
        "middle": named["middle"],
        "late": named["last"],
    }
    outside = {
        "leading": [],
        "middle": [*before_middle],
        "late": thirds,
    }
    return pd.concat([above.loc[inside[role]], -above.loc[outside[role]]])


def at_widest(
    tables: TableSet,
    margins: Callable[[TableSet], pd.DataFrame],
) -> Callable[[TableSet], pd.Series]:
    """The numbers of one dimension, the one whose least number is largest on all texts.

    It stays the same when texts are left out: an arg max has no jackknife.

    Args:
        margins: returns one column per dimension.
    """
    dimension = margins(tables).min(skipna=False).idxmax()
    return lambda some: margins(some)[dimension]


def two_thirds(tables: TableSet) -> int:
    """The last of the first two thirds of the layers: 8 of 12."""
    depth = int(tables["dimension_means"]["layer"].max())
    return round(2 * depth / 3)


def in_role(tables: TableSet, role: str) -> int | None:
    """The dimension with the widest margin in a role of :func:`role_margins`; None without one."""
    least = role_margins(tables, role).min()
    if least.max() > 0:
        return int(least.idxmax())
    return None


# --- Attention by type of token
# -----------------------------------------------------------------------


def weights_in(
    tables: TableSet,
    part: str | None = None,
    above: str | None = None,
) -> pd.DataFrame:
    """Mean weight per key over the heads, in a part of :func:`named_layers`.

    Args:
        tables: with ``attention_by_token_type``.
        part: early, middle or last; all layers unless given.
        above: ``uniform`` for how much it exceeds the weight that attention spread evenly gives
            under the same mask.

    Returns:
        One row per attention layer, one column per type of key; NaN where there is no such key.
    """
    table = tables["attention_by_token_type"]
    if above == "uniform":
        excess = table["weight"] - table["uniform_weight"]
        table = table.assign(weight=excess)
    weights = table.pivot_table("weight", "layer", "key_type", aggfunc="mean", observed=True)
    weights = weights.reindex(columns=TOKEN_TYPES)
    if part is None:
        return weights
    depth = int(weights.index.max())
    return weights.reindex(named_layers(depth)[part])


# --- Contributions to the scores
# ----------------------------------------------------------------------


def by_head(tables: TableSet) -> pd.DataFrame:
    """Mean C_j over all pairs: one row per attention layer and dimension, one column per head."""
    rows = tables["score_contributions"].query("key_type == 'all'")
    return rows.pivot(index=["layer", "dimension"], columns="head", values="contribution")


def by_key_type(tables: TableSet) -> pd.DataFrame:
    """Mean C_j over the heads: rows by attention layer and dimension, a column per type of key."""
    keys = ["layer", "dimension", "key_type"]
    groups = tables["score_contributions"].groupby(keys, observed=True)
    means = groups["contribution"].mean().unstack()
    return means.reindex(columns=TOKEN_TYPES)


def outliers_read(
    tables: TableSet,
    threshold: float = THRESHOLD,
    typed: bool = False,
) -> pd.MultiIndex:
    """The pairs of an attention layer and a dimension of its input that is an outlier.

    Args:
        tables: with ``dimension_means``.
        threshold: of the z-score; 3 in the paper.
        typed: for outliers of the mean over the tokens of some type, in place of that over all
            tokens.
    """
    means = tables["dimension_means"]
    overall = means["token_type"] == "all"
    means = means[~overall] if typed else means[overall]
    wide = means.pivot(index=["layer", "token_type"], columns="dimension", values="mean")
    outlying = (zscores(wide) > threshold).groupby("layer").any()
    # Attention layer l reads hidden layer l − 1.
    outlying.index += 1
    pairs = outlying.stack()
    return pairs.index[pairs]


def read_by(tables: TableSet, layers: Iterable[int]) -> pd.Index:
    """The dimensions that are outliers of what some attention layers read."""
    pairs = outliers_read(tables)
    pairs = pairs[pairs.isin([*layers], "layer")]
    return pairs.get_level_values("dimension").unique()


def leaders_read(tables: TableSet, layers: Iterable[int]) -> pd.MultiIndex:
    """Some attention layers, each with the leading outlier dimension of its input.

    Leading is the dimension of the largest z-score.
    """
    leaders = tables["outlier_dimensions"].drop_duplicates("layer")
    leaders = leaders[["layer", "dimension"]]
    leaders = leaders.assign(layer=leaders["layer"] + 1)
    chosen = leaders["layer"].isin([*layers])
    return pd.MultiIndex.from_frame(leaders[chosen])


def led_by_outliers(tables: TableSet) -> pd.Series:
    """Share of the heads whose largest |C_j| is that of an outlier dimension, by layer.

    Outlier dimensions are those of the layer's input.
    """
    sizes = by_head(tables).abs()
    outlying = sizes.index.isin(outliers_read(tables))
    of_outliers = sizes[outlying].groupby("layer").max()
    largest = sizes.groupby("layer").max()
    return of_outliers.eq(largest).mean(axis=1)


@dataclass(frozen=True)
class HeadShares(Chosen):
    """A statistic whose numbers are shares of heads; the last number is of how many heads.

    Where a share is the same whichever texts are left out, its interval is that of
    :func:`~analysis_book.papers.counts.exact`.
    """

    def judged(self, estimates: list[Estimate]) -> list[Estimate]:
        *shares, heads = estimates
        return [_counted(share, int(heads.value)) for share in shares]


def _counted(share: Estimate, heads: int) -> Estimate:
    has_interval = not math.isnan(share.ci_low)
    if has_interval or math.isnan(share.value):
        return share
    return exact(round(share.value * heads), heads)


def head_shares(
    number: Callable[..., pd.Series | pd.DataFrame | float],
    choose: Callable[[TableSet], object] | None = None,
    layers: int = 1,
) -> HeadShares:
    """The :class:`HeadShares` that a function of the tables gives.

    Args:
        number: returns one or several shares; it receives the tables, and what is chosen if any.
        choose: chooses an item, such as a dimension, see :class:`~analysis_lib.measurement.Chosen`.
        layers: of how many layers a share is.
    """

    def numbers(tables: TableSet, chosen: object) -> list[float]:
        given = (tables, chosen) if choose else (tables,)
        heads = by_head(tables).shape[1]
        return [*np.atleast_1d(number(*given)).ravel(), heads * layers]

    return HeadShares(numbers, choose or (lambda *_: None), smooth=False)


def reached(
    tables: TableSet,
    layers: Iterable[int],
    sign: int,
    share: float,
) -> pd.DataFrame:
    """The C_j, or with the sign -1 the -C_j, that a share of the heads reaches.

    One row per layer, one column per dimension. Above zero, it is the sign of the contribution in
    so many heads.
    """
    rows = sign * by_head(tables).loc[[*layers]]
    return rows.quantile(1 - share, axis=1, interpolation="lower").unstack()


def standing_out(
    tables: TableSet,
    layers: Iterable[int],
    sign: int,
    share: float,
) -> pd.Series:
    """The three of the outlier dimensions that layers read with the largest |C_j|.

    That is a mean over heads and layers. A dimension that adds next to nothing may have any sign,
    and is none of them.

    Returns:
        By dimension, what is :func:`reached` in each of the layers, largest first.
    """
    layers = [*layers]
    sizes = by_head(tables).loc[layers].abs().mean(axis=1)
    sizes = sizes.groupby("dimension").mean()
    outlying = sizes.index.isin(read_by(tables, layers))
    three = sizes[outlying].nlargest(3).index
    least = reached(tables, layers, sign, share)[three].min()
    return least.sort_values(ascending=False)


def explained_gap(
    tables: TableSet,
    rival: str = "other",
    preferred: str | None = None,
    threshold: float = THRESHOLD,
) -> pd.DataFrame:
    """How much outlier dimensions add to the score of a layer's preferred type of key.

    For each attention layer, the preferred type is the one whose mean weight per key lies farthest
    above even attention, other tokens left out, unless one is named. Its gap to a rival type is Σ_j
    (C_j of its keys − C_j of the rival's), mean over heads: how much higher the scores of its keys
    are.

    Args:
        tables: with ``score_contributions``, ``dimension_means`` and ``attention_by_token_type``.
        rival: ``other``, or ``runner-up``: the type with the second largest weight.
        preferred: a type of key to take in every layer.
        threshold: of the z-score from which a dimension is an outlier; 3 in the paper.

    Returns:
        By layer: key_type (the preferred), rival, gap (before scaling), and the parts of the gap
        that some dimensions add: outliers (those of the layer's input), typed (those that are
        outliers for some type of token), and largest, that of largest_dimension, with is_outlier,
        whether this is one of the former.
    """
    means = by_key_type(tables)
    means["outliers"] = means.index.isin(outliers_read(tables, threshold))
    means["typed"] = means.index.isin(outliers_read(tables, threshold, typed=True))
    rows = []
    for layer, weight in weights_in(tables, above="uniform").iterrows():
        key_type = preferred or weight.drop("other").idxmax()
        against = rival
        if rival == "runner-up":
            against = weight.drop(key_type).idxmax()
        in_layer = means.loc[layer]
        gap = in_layer[key_type] - in_layer[against]
        largest = gap.idxmax()
        row = {
            "layer": layer,
            "key_type": key_type,
            "rival": against,
            "gap": gap.sum(),
            "outliers": gap[in_layer["outliers"]].sum(),
            "typed": gap[in_layer["typed"]].sum(),
            "largest": gap.max(),
            "largest_dimension": largest,
            "is_outlier": in_layer["outliers"][largest],
        }
        rows.append(row)
    return pd.DataFrame(rows).set_index("layer")


def share_of_gap(
    part: str,
    rule: str = "outliers",
    **options: object,
) -> Ratio:
    """The share of the :func:`explained_gap` that some dimensions add in the layers of a part.

    Args:
        part: of :func:`named_layers`.
        rule: the column of what they add: ``outliers`` or ``typed``; or ``gap - outliers`` for what
            they do not.
        options: as of :func:`explained_gap`.
    """

    def part_and_whole(tables: TableSet) -> tuple[float, float]:
        gaps = explained_gap(tables, **options)
        depth = int(gaps.index.max())
        gaps = gaps.reindex(named_layers(depth)[part])
        return gaps.eval(rule).sum(), gaps["gap"].sum()

    return Ratio(part_and_whole)
