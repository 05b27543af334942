"""Published numbers and claims, and the verdict of a model on each."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral

import numpy as np
import pandas as pd

from analysis_lib.comparison import Comparison
from analysis_lib.errors import AnalysisError, near_names
from analysis_lib.measure import Tables
from analysis_lib.metrics.anisotropy import isotropic_cosine_quantile
from analysis_lib.metrics.attention_by_token_type import by_layer
from analysis_lib.metrics.drift import SIGNIFICANCE, drift_by_layer, drift_correlation
from analysis_lib.metrics.outlier_dimensions import THRESHOLD, magnitude_zscores
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
        limits: what the statistic cannot leave, and its interval neither.
        sampled: False where the statistic is itself a verdict on chance, such as a p-value: it decides alone, without
            an interval.
    """

    source: str
    statement: str
    quantity: str
    statistic: Callable[[TableSet], float]
    needs: tuple[str, ...]
    bound: float = 0.0
    limits: tuple[float, float] = (-math.inf, math.inf)
    sampled: bool = True


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
        Columns claim, source, quantity, value, ci_low, ci_high (missing where the claim has no interval), bound,
        verdict.
    """
    claims = list(claims)
    missing = {table for claim in claims for table in claim.needs} - set(tables)
    if missing:
        raise AnalysisError(f"these claims need the tables {', '.join(sorted(missing))}: measure them too")
    bounds = [claim.bound for claim in claims]
    value = np.array([claim.statistic(tables) for claim in claims], dtype=float)
    low, high = np.full((2, len(claims)), math.nan)
    if sampled := [i for i, claim in enumerate(claims) if claim.sampled]:
        ends = tables.interval(lambda t: [claims[i].statistic(t) for i in sampled])[1:]
        low[sampled], high[sampled] = (np.clip(end, *np.transpose([claims[i].limits for i in sampled])) for end in ends)
    # What is not sampled decides by itself: an interval that is a point.
    alone = np.array([not claim.sampled for claim in claims])
    deciding = zip(np.where(alone, value, low), np.where(alone, value, high), bounds, strict=True)
    return pd.DataFrame(
        {
            "claim": [claim.statement for claim in claims],
            "source": [claim.source for claim in claims],
            "quantity": [claim.quantity for claim in claims],
            "value": value,
            "ci_low": low,
            "ci_high": high,
            "bound": bounds,
            "verdict": [verdict(*numbers) for numbers in deciding],
        }
    )


def verdicts_by_model(comparison: Comparison, claims_of: Callable[[Tables], Iterable[Claim]]) -> pd.DataFrame:
    """The verdicts on every model of a comparison, without the untrained twins.

    Args:
        comparison: with the tables that the claims need.
        claims_of: the claims to test on a model, from its tables: some depend on the widths of its layers.

    Returns:
        The column model, then those of ``verdicts``.
    """
    found = {model: verdicts(claims_of(tables), tables) for model, tables in comparison.trained.items()}
    return pd.concat(found, names=["model"]).reset_index("model").reset_index(drop=True)


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


_GODEY = "Godey et al. 2024"
# What section 3.2 calls very anisotropic, of every layer of every speech model.
VERY_ANISOTROPIC = 0.2

Width = int | Mapping[int, int]


def _hidden_cosines(tables: TableSet) -> pd.Series:
    """The average cosine of the hidden states, by layer."""
    table = tables["anisotropy"]
    return table[table["space"] == "hidden"].set_index("layer")["cosine"]


def _excess_over_isotropy(width: Width) -> Callable[[TableSet], float]:
    """The largest distance of a layer's average cosine above the isotropic 95th percentile of its own width."""

    def statistic(tables: TableSet) -> float:
        cosines = _hidden_cosines(tables)
        widths = [int(width) if isinstance(width, Integral) else _width_of(layer, width) for layer in cosines.index]
        quantiles = {dimensions: isotropic_cosine_quantile(dimensions) for dimensions in set(widths)}
        return (cosines - [quantiles[dimensions] for dimensions in widths]).max()

    return statistic


def _width_of(layer: int, widths: Mapping[int, int]) -> int:
    if layer not in widths:
        raise AnalysisError(f"the widths of layers {list(widths)} were given, and none of layer {layer}: add it")
    return int(widths[layer])


def godey_claims(width: Width) -> list[Claim]:
    """Claims of section 3 on the hidden states of a transformer, of whatever modality.

    Args:
        width: dimensions of the hidden states, or of those of each layer: ``{layer: width}``.
    """
    return [
        Claim(
            f"{_GODEY}, sec. 3.1 and app. B",
            "The model displays a significant level of anisotropy in at least one of its layers.",
            "largest average cosine of a layer minus the 95th percentile of the cosine in an isotropic space",
            _excess_over_isotropy(width),
            ("anisotropy",),
        )
    ]


GODEY_SPEECH = [
    Claim(
        f"{_GODEY}, sec. 3.2",
        "Every layer of a speech model has an average cosine of at least 0.2.",
        "average cosine of the layer where it is least",
        lambda tables: _hidden_cosines(tables).min(),
        ("anisotropy",),
        bound=VERY_ANISOTROPIC,
        limits=(-1.0, 1.0),
    )
]


def godey_convolution_claims(width: Width) -> list[Claim]:
    """The claim of section 3.2 on convolutional networks, in two readings: the paper gives "isotropic" no number.

    The strict one is the reverse of what it says of transformers. Activations after a rectifier are never negative,
    so that it fails wherever they are measured there; the looser one is what its Figure 4 can show.

    Args:
        width: dimensions of the hidden vectors, or of those of each layer: ``{layer: width}``.
    """
    excess = _excess_over_isotropy(width)
    return [
        Claim(
            f"{_GODEY}, sec. 3.2",
            "Most convolution-based models are isotropic (strictly: no layer rises above an isotropic cloud).",
            "least distance of a layer's average cosine below the 95th percentile of the cosine in an isotropic space",
            lambda tables: -excess(tables),
            ("anisotropy",),
        ),
        Claim(
            f"{_GODEY}, sec. 3.2",
            "Most convolution-based models are isotropic (loosely: no layer is as anisotropic as all of speech).",
            f"distance below {VERY_ANISOTROPIC} of the average cosine of the layer where it is largest",
            lambda tables: VERY_ANISOTROPIC - _hidden_cosines(tables).max(),
            ("anisotropy",),
        ),
    ]


def _drift_significance(test: str) -> Callable[[TableSet], float]:
    def statistic(tables: TableSet) -> float:
        row = drift_correlation(drift_by_layer(tables).assign(model="model")).iloc[0]
        return SIGNIFICANCE - row[f"{test}_p"] if row["enough"] else math.nan

    return statistic


GODEY_DRIFT = [
    Claim(
        f"{_GODEY}, {section}",
        "Over the layers, the average cosine is correlated with the drift.",
        f"{SIGNIFICANCE} minus the p-value of {test.capitalize()}'s correlation of the norm of the mean hidden state "
        f"with the average cosine",
        _drift_significance(test),
        ("anisotropy", "mean_vector"),
        sampled=False,
    )
    for test, section in (("spearman", "sec. 3.3"), ("pearson", "app. A"))
]


def compare_with_untrained(trained: TableSet, untrained: TableSet) -> pd.DataFrame:
    """What training adds to the anisotropy of each layer: a trained model beside its twin with random weights.

    Args:
        trained, untrained: with ``anisotropy``, of the same corpus.

    Returns:
        Columns layer, trained and untrained (average cosine of the hidden states), difference, its 95 % interval, and
        more_anisotropic: whether training makes the layer so, as a verdict. The two errors are added as if they
        were independent, which is wider than right where the twins read the same texts.

    Raises:
        AnalysisError: the two do not have the same layers.
    """
    both = []
    for tables in (trained, untrained):
        table = tables["anisotropy"]
        both.append(table[table["space"] == "hidden"].set_index("layer")[["cosine", "ci_low", "ci_high"]])
    ours, twin = both
    if list(ours.index) != list(twin.index):
        raise AnalysisError(
            f"the trained model has layers {list(ours.index)} and the untrained one {list(twin.index)}: "
            f"give a model and its own untrained twin"
        )
    difference = ours["cosine"] - twin["cosine"]
    # Student's t of both is that of as many groups: half-widths add like standard errors.
    reach = np.hypot(*((side["ci_high"] - side["ci_low"]) / 2 for side in both))
    low, high = difference - reach, difference + reach
    columns = {
        "trained": ours["cosine"],
        "untrained": twin["cosine"],
        "difference": difference,
        "ci_low": low,
        "ci_high": high,
        "more_anisotropic": [verdict(*ends, 0.0) for ends in zip(low, high, strict=True)],
    }
    return pd.DataFrame(columns).reset_index()


_TRAINING_EFFECT = ["model", "layers", "more", "less", "undecided"]
_GREATEST = ["layer", "trained", "untrained", "difference", "ci_low", "ci_high"]


def training_effect(comparison: Comparison) -> pd.DataFrame:
    """What training adds to the anisotropy of each model of a comparison: a row a model that has an untrained twin.

    Args:
        comparison: with ``anisotropy``.

    Returns:
        Columns model; layers, and in how many of them training makes the average cosine more, less or neither
        beyond its interval (undecided); then those of ``compare_with_untrained`` in the layer where they differ most.
    """
    rows = []
    for model, twin in comparison.untrained.items():
        layers = compare_with_untrained(comparison.trained[model], twin)
        counts = [(layers["more_anisotropic"] == found).sum() for found in (HOLDS, FAILS, UNDECIDED)]
        greatest = layers.loc[layers["difference"].abs().idxmax(), _GREATEST]
        rows.append((model, len(layers), *counts, int(greatest["layer"]), *greatest.iloc[1:]))
    return pd.DataFrame(rows, columns=[*_TRAINING_EFFECT, *_GREATEST])


# --- Maruta and Matsuzaki 2024 ----------------------------------------------------------------------


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


__all__ = [
    "GODEY_DRIFT",
    "GODEY_SPEECH",
    "MARUTA_ATTENTION",
    "MARUTA_CONTRIBUTIONS",
    "MARUTA_DIMENSIONS",
    "Claim",
    "agreement",
    "compare_table1",
    "compare_with_untrained",
    "contributions_by_key_type",
    "dominated_heads",
    "explained_gap",
    "godey_claims",
    "godey_convolution_claims",
    "is_published_model",
    "outlier_share",
    "published",
    "representative_layers",
    "tested_layers",
    "training_effect",
    "verdict",
    "verdicts",
    "verdicts_by_model",
]
