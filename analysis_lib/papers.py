"""Published numbers and claims, and the verdict of a model on each."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis_lib.errors import AnalysisError, near_names
from analysis_lib.measure import Tables
from analysis_lib.metrics.anisotropy import isotropic_cosine_quantile
from analysis_lib.metrics.attention_by_token_type import by_layer
from analysis_lib.metrics.outlier_dimensions import magnitude_zscores
from analysis_lib.models import TOKEN_TYPES
from analysis_lib.packages import data_directory

TableSet = Mapping[str, pd.DataFrame]
HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "undecided"


@dataclass(frozen=True)
class Claim:
    """A published claim as a number that lies above a bound if the claim is true.

    Attributes:
        source: paper and section.
        statement: what the paper says, transferred to a model of any depth.
        quantity: what is computed, in words.
        statistic: computes it from the tables of ``needs``.
        needs: the tables it reads.
        bound: the claim holds where the statistic is larger.
    """

    source: str
    statement: str
    quantity: str
    statistic: Callable[[TableSet], float]
    needs: tuple[str, ...]
    bound: float = 0.0


def verdict(low: float, high: float, bound: float) -> str:
    """``holds`` where the whole interval lies above the bound, ``does not hold`` below it, else ``undecided``.

    >>> verdict(0.1, 0.3, 0.0), verdict(-0.1, 0.3, 0.0), verdict(-0.3, -0.1, 0.0)
    ('holds', 'undecided', 'does not hold')
    """
    if low > bound:
        return HOLDS
    return FAILS if high <= bound else UNDECIDED  # NaN compares false both times: undecided


def verdicts(claims: Iterable[Claim], tables: Tables) -> pd.DataFrame:
    """Every claim with the number that decides it, its 95 % jackknife interval over utterances, and the verdict.

    Returns:
        Columns claim, source, quantity, value, ci_low, ci_high, bound, verdict.
    """
    claims = list(claims)
    missing = {table for claim in claims for table in claim.needs} - set(tables)
    if missing:
        raise AnalysisError(f"these claims need the tables {', '.join(sorted(missing))}: measure them too")
    bounds = [claim.bound for claim in claims]
    value, low, high = tables.interval(lambda t: [claim.statistic(t) for claim in claims])
    return pd.DataFrame(
        {
            "claim": [claim.statement for claim in claims],
            "source": [claim.source for claim in claims],
            "quantity": [claim.quantity for claim in claims],
            "value": value,
            "ci_low": low,
            "ci_high": high,
            "bound": bounds,
            "verdict": [verdict(*numbers) for numbers in zip(low, high, bounds, strict=True)],
        }
    )


def published(name: str) -> pd.DataFrame:
    """A table that a paper prints, such as ``maruta_table1_contributions``.

    Raises:
        AnalysisError: no such table (with the nearest names).
    """
    folder = data_directory() / "reference"
    names = [path.stem for path in folder.glob("*.csv")]
    if name not in names:
        raise AnalysisError(f"there is no published table {name}: {near_names(name, names)}")
    return pd.read_csv(folder / f"{name}.csv")


# --- Depth: the papers' layers of a 12-layer model, in a model of any depth -------------------------


def early_layers(depth: int) -> list[int]:
    """Layers 2 and 3 of 12, and the like of another depth: from 2 to a quarter of the layers."""
    return list(range(2, max(2, round(depth / 4)) + 1))


def middle_layers(depth: int) -> list[int]:
    """Layers 5 to 10 of 12, and the like of another depth."""
    return list(range(math.ceil(5 * depth / 12), math.floor(10 * depth / 12) + 1))


def late_layers(depth: int) -> list[int]:
    """Layers 11 and 12 of 12, and the like of another depth: those after the middle ones."""
    return list(range(math.floor(10 * depth / 12) + 1, depth + 1))


def representative_layers(depth: int) -> list[int]:
    """Layers 2, 6 and 12 of 12 (Maruta and Matsuzaki 2024, sec. 4.2), and the like of another depth."""
    return [min(2, depth), max(1, depth // 2), depth]


# --- Godey et al. 2024 ------------------------------------------------------------------------------


def _excess_over_isotropy(width: int) -> Callable[[TableSet], float]:
    def statistic(tables: TableSet) -> float:
        table = tables["anisotropy"]
        hidden = table.loc[table["space"] == "hidden", "cosine"]
        return hidden.max() - isotropic_cosine_quantile(width)

    return statistic


def godey_claims(width: int) -> list[Claim]:
    """Claims of section 3 on the hidden states of a model whose hidden states have ``width`` dimensions."""
    return [
        Claim(
            "Godey et al. 2024, sec. 3.1",
            "The model displays a significant level of anisotropy in at least one of its layers.",
            "largest average cosine of a layer, less the 95th percentile of the cosine in an isotropic space",
            _excess_over_isotropy(width),
            ("anisotropy",),
        )
    ]


# --- Maruta and Matsuzaki 2024 ----------------------------------------------------------------------


def _all_tokens(tables: TableSet) -> pd.DataFrame:
    """Mean of each dimension over all tokens: a row a layer, a column a dimension."""
    means = tables["dimension_means"]
    return means[means["token_type"] == "all"].pivot(index="layer", columns="dimension", values="mean")


def _least_zscore(tables: TableSet) -> float:
    # Layer 0 is the embedding: the claim is about the outputs of the layers.
    zscores = _all_tokens(tables).drop(index=0).apply(lambda row: pd.Series(magnitude_zscores(row.to_numpy())), axis=1)
    return zscores.min().max()


def _special_token_excess(tables: TableSet) -> float:
    """|mean| of the special or punctuation type that is largest, over that of other tokens, in outlier dimensions."""
    means = tables["dimension_means"]
    outliers = tables["outlier_dimensions"]
    leading = outliers[outliers["layer"] > 0].groupby("layer").head(1)[["layer", "dimension"]]
    if leading.empty:
        return math.nan
    values = means.merge(leading).assign(mean=lambda t: t["mean"].abs())
    values = values.pivot_table(index="layer", columns="token_type", values="mean")
    values = values.reindex(columns=TOKEN_TYPES)
    return (values.drop(columns="other").max(axis=1) / values["other"]).median()


def _weight_margin(layers: Callable[[int], list[int]], key_type: str) -> Callable[[TableSet], float]:
    """The least margin, over the layers, of a type's mean weight per key over the best other type."""

    def statistic(tables: TableSet) -> float:
        weights = by_layer(tables["attention_by_token_type"]).pivot(index="layer", columns="key_type", values="weight")
        # reindex: a shallow model may lack such a layer, and the claim is then undecided.
        chosen = weights.reindex(layers(int(weights.index.max())))
        if key_type not in chosen:
            return math.nan
        return (chosen[key_type] - chosen.drop(columns=key_type).max(axis=1)).min()

    return statistic


def _late_rise(tables: TableSet) -> float:
    weights = by_layer(tables["attention_by_token_type"]).pivot(index="layer", columns="key_type", values="weight")
    if "punct" not in weights:
        return math.nan
    depth = int(weights.index.max())
    return weights["punct"].reindex(late_layers(depth)).min() - weights["punct"].reindex(middle_layers(depth)).max()


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


def explained_gap(tables: TableSet) -> pd.DataFrame:
    """How much of the score that favours a layer's preferred type of key the outlier dimensions explain.

    For each attention layer, the preferred type is the one with the largest mean weight per key. The gap of a head
    is Σ_j (C_j for keys of that type − C_j for other keys): how much higher their scores are. The share is what the
    outlier dimensions of the layer's input add to the gap, over the whole gap, both summed over heads.

    Returns:
        Columns layer, key_type (the preferred), gap (mean over heads, before scaling) and share. A share above 1 means
        that the remaining dimensions work against it; where the gap is not positive there is no share (NaN).
    """
    weights = by_layer(tables["attention_by_token_type"])
    preferred = weights[weights["key_type"] != "other"].sort_values("weight").groupby("layer").tail(1)
    by_type = tables["score_contributions"].groupby(["layer", "dimension", "key_type"], observed=False)
    means = by_type["contribution"].mean().unstack().reindex(columns=TOKEN_TYPES)
    outliers = _outliers_by_layer(tables)
    rows = []
    for layer, key_type in preferred.sort_values("layer")[["layer", "key_type"]].itertuples(index=False):
        gap = means.loc[layer, key_type] - means.loc[layer, "other"]
        total = gap.sum()
        part = gap.reindex(outliers.get(layer, [])).sum()
        rows.append((layer, key_type, total, part / total if total > 0 else math.nan))
    return pd.DataFrame(rows, columns=["layer", "key_type", "gap", "share"])


def _mean_over(layers: Callable[[int], list[int]], values: Callable[[TableSet], pd.Series]):
    def statistic(tables: TableSet) -> float:
        return float(values(tables).reindex(layers(_depth(tables))).mean())

    return statistic


def _gap_share(tables: TableSet) -> pd.Series:
    return explained_gap(tables).set_index("layer")["share"]


def _less_than_half(statistic: Callable[[TableSet], float]) -> Callable[[TableSet], float]:
    return lambda tables: 1 - statistic(tables)


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
        "|mean| of the type that is largest over |mean| of other tokens, in the leading outlier dimension of each "
        "layer, median over layers",
        _special_token_excess,
        ("dimension_means", "outlier_dimensions"),
        bound=2.0,
    ),
]

MARUTA_ATTENTION = [
    Claim(
        f"{_MARUTA}, sec. 2.2",
        "In early layers (2 and 3 of 12), a [CLS] key receives the largest weight.",
        "mean weight of a [CLS] key less that of the best other type, least over these layers",
        _weight_margin(early_layers, "cls"),
        ("attention_by_token_type",),
    ),
    Claim(
        f"{_MARUTA}, sec. 2.2",
        "In middle layers (5 to 10 of 12), a [SEP] key receives the largest weight.",
        "mean weight of a [SEP] key less that of the best other type, least over these layers",
        _weight_margin(middle_layers, "sep"),
        ("attention_by_token_type",),
    ),
    Claim(
        f"{_MARUTA}, sec. 2.2",
        "In the last layers (11 and 12 of 12), the weight of commas and full stops rises sharply.",
        "least weight of such a key in these layers less its largest in the middle layers",
        _late_rise,
        ("attention_by_token_type",),
    ),
]

_CONTRIBUTION_TABLES = ("score_contributions", "outlier_dimensions", "attention_by_token_type")

MARUTA_CONTRIBUTIONS = [
    Claim(
        f"{_MARUTA}, app. A",
        "In layer 1 no outlier dimension dominates the scores yet.",
        "1 less the share of heads of layer 1 whose largest |C_j| is that of an outlier dimension",
        lambda tables: 1 - dominated_heads(tables).get(1, 0.0),
        _CONTRIBUTION_TABLES[:2],
        bound=0.5,
    ),
    Claim(
        f"{_MARUTA}, sec. 4.3",
        "In middle layers, outlier dimensions dominate the scores of nearly all heads.",
        "share of heads whose largest |C_j| is that of an outlier dimension, mean over these layers",
        _mean_over(middle_layers, dominated_heads),
        _CONTRIBUTION_TABLES[:2],
        bound=0.5,
    ),
    Claim(
        f"{_MARUTA}, sec. 4.3",
        "In early layers, the outlier dimensions alone do not explain where attention gathers.",
        "1 less the share of the preferred type's score gap that outlier dimensions add, mean over these layers",
        _less_than_half(_mean_over(early_layers, _gap_share)),
        _CONTRIBUTION_TABLES,
        bound=0.5,
    ),
    Claim(
        f"{_MARUTA}, sec. 4.3",
        "In middle layers, the outlier dimensions explain where attention gathers.",
        "share of the preferred type's score gap that outlier dimensions add, mean over these layers",
        _mean_over(middle_layers, _gap_share),
        _CONTRIBUTION_TABLES,
        bound=0.5,
    ),
    Claim(
        f"{_MARUTA}, sec. 4.3",
        "In the last layers, the outlier dimensions explain where attention gathers.",
        "share of the preferred type's score gap that outlier dimensions add, mean over these layers",
        _mean_over(late_layers, _gap_share),
        _CONTRIBUTION_TABLES,
        bound=0.5,
    ),
]


def contributions_by_key_type(tables: TableSet, layers: Iterable[int], dimensions_per_layer: int = 2) -> pd.DataFrame:
    """Mean C_j per type of key and head, as in Table 1: the leading outlier dimensions of each layer's input.

    Returns:
        Columns layer, dimension, key_type, then one a head: head 1, head 2, ... No row where the layers read no
        outlier dimension.
    """
    outliers = _outliers_by_layer(tables)
    table = tables["score_contributions"]
    chosen = [(layer, d) for layer in layers for d in outliers.get(layer, [])[:dimensions_per_layer]]
    keys = ["layer", "dimension", "key_type"]
    if not chosen:
        return pd.DataFrame(columns=keys)
    rows = table[table["key_type"] != "all"].merge(pd.DataFrame(chosen, columns=keys[:2]))
    wide = rows.pivot(index=keys, columns="head", values="contribution").rename(columns="head {}".format)
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


__all__ = [
    "MARUTA_ATTENTION",
    "MARUTA_CONTRIBUTIONS",
    "MARUTA_DIMENSIONS",
    "Claim",
    "agreement",
    "compare_table1",
    "contributions_by_key_type",
    "dominated_heads",
    "explained_gap",
    "godey_claims",
    "is_published_model",
    "published",
    "representative_layers",
    "verdict",
    "verdicts",
]
