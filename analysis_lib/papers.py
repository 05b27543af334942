"""Published numbers and claims, and the verdict of a model on each."""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral

import numpy as np
import pandas as pd
from scipy import stats

from analysis_lib.comparison import Comparison
from analysis_lib.dynamics import Dynamics, chance_band, cosine_of_layers, drift_along, heads_shown, thirds
from analysis_lib.errors import AnalysisError, near_names
from analysis_lib.measure import Tables
from analysis_lib.metrics.anisotropy import isotropic_cosine_quantile
from analysis_lib.metrics.attention_by_token_type import by_layer
from analysis_lib.metrics.drift import SIGNIFICANCE, drift_by_layer, drift_correlation
from analysis_lib.metrics.outlier_dimensions import THRESHOLD, magnitude_zscores
from analysis_lib.models import TOKEN_TYPES
from analysis_lib.packages import data_directory
from analysis_lib.training.tasks import wilson
from analysis_lib.untrained import DRAW, seed_interval

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
    value = np.array([claim.statistic(tables) for claim in claims], dtype=float)
    low, high = np.full((2, len(claims)), math.nan)
    if sampled := [i for i, claim in enumerate(claims) if claim.sampled]:
        ends = tables.interval(lambda t: [claims[i].statistic(t) for i in sampled])[1:]
        low[sampled], high[sampled] = (np.clip(end, *np.transpose([claims[i].limits for i in sampled])) for end in ends)
    return _decided(claims, value, low, high)


def _decided(claims: Sequence[Claim], value: np.ndarray, low: np.ndarray, high: np.ndarray) -> pd.DataFrame:
    """The table of ``verdicts``, from the number of each claim and the ends of its interval."""
    bounds = [claim.bound for claim in claims]
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


def _by_norm(table: pd.DataFrame, column: str) -> pd.Series:
    """The mean of a column over heads, by the norm of the bias, in its order."""
    return table.groupby("bias_norm")[column].mean()


def _hidden_by_norm(tables: TableSet, layer: int, column: str) -> pd.Series:
    vectors = tables["vectors"]
    return _by_norm(vectors[(vectors["space"] == "hidden") & (vectors["layer"] == layer)], column)


def _of_queries_and_keys(tables: TableSet, column: str) -> list[pd.Series]:
    vectors = tables["vectors"]
    return [_by_norm(vectors[vectors["space"] == space], column) for space in ("query", "key")]


def _approach_to_one(tables: TableSet) -> float:
    # Near 1 a difference of cosines says little, and the factor by which they lack less says as much as elsewhere.
    inputs, outputs = (1 - _hidden_by_norm(tables, layer, "cosine") for layer in (0, 1))
    return float((inputs / outputs).min())


# Of what section 4 says that it increases with the norm of the bias: it has to double.
_DOUBLED = 0.3


def _growth(values: pd.Series) -> float:
    """The decades from the smallest norm of the bias to the largest: factors of seeds are no symmetric sample."""
    return math.log10(values.iloc[-1] / values.iloc[0])


def _spread_growth(of: str) -> Callable[[TableSet], float]:
    """The lesser of the decades by which the largest and the smallest weight move away from the median of a row."""

    def statistic(tables: TableSet) -> float:
        greatest, least, median = (
            _by_norm(tables["attention"], column) for column in (f"{of}_max", f"{of}_min", "row_median")
        )
        return min(_growth(greatest - median), _growth(median - least))

    return statistic


def _early_sharpening(tables: TableSet) -> float:
    divergence = _by_norm(tables["attention"], "divergence")
    tenth = np.interp(divergence.index[-1] / 10, divergence.index, divergence)
    return float((tenth - divergence.iloc[0]) / (divergence.iloc[-1] - divergence.iloc[0]))


def _bracketed_fixed_point(tables: TableSet) -> float:
    (found,) = tables["fixed_points"].itertuples()
    return min(found.excess, -found.excess_at_highest)


def godey_fixed_point_claims(norms_over_root: pd.Series, width: int) -> list[Claim]:
    """Claims of section 4.2 on inputs and outputs of an untrained block, for :func:`verdicts_by_architecture`.

    Args:
        norms_over_root: the mean norm of each layer of a trained model, over the root of its width.
        width: dimensions of the hidden states of the block.
    """
    layers = norms_over_root.mean()

    def distance(tables: TableSet) -> float:
        (found,) = tables["fixed_points"]["fixed_point"]
        return abs(math.log10(found / math.sqrt(width) / layers))

    section = f"{_GODEY}, sec. 4.2"
    return [
        Claim(
            section,
            "Outputs have a higher average cosine than inputs, at every norm of the bias.",
            "1 − average cosine of inputs, over that of outputs, at the norm where it is least",
            _approach_to_one,
            ("vectors",),
            bound=1.0,
        ),
        Claim(
            section,
            "The norm of the average output increases with the norm of the bias.",
            "least rise of that norm from one norm of the bias to the next",
            lambda tables: float(_hidden_by_norm(tables, 1, "norm_of_mean").diff().min()),
            ("vectors",),
        ),
        Claim(
            section,
            "There is a norm of the bias at which inputs and outputs are equally long.",
            "how much longer outputs are without bias, or inputs with the largest: the lesser of both",
            _bracketed_fixed_point,
            ("fixed_points",),
        ),
        Claim(
            section,
            "The fixed point is in the order of magnitude of the hidden norms of the trained model.",
            "1/2 minus the decades between both, each over the root of its width (mean over the layers)",
            lambda tables: 0.5 - distance(tables),
            ("fixed_points",),
        ),
    ]


def godey_block_claims(head_width: int) -> list[Claim]:
    """Claims of sections 4.3 and 4.4 on the attention of an untrained block, for :func:`verdicts_by_architecture`.

    Args:
        head_width: dimensions of a head.
    """
    decades = "decades from the smallest norm of the bias to the largest, of"
    return [
        Claim(
            f"{_GODEY}, sec. 4.3",
            "Scores before the softmax move away from zero as the norm of the bias grows.",
            f"{decades} the mean of |score|",
            lambda tables: _growth(_by_norm(tables["attention"], "score_magnitude")),
            ("attention",),
            bound=_DOUBLED,
        ),
        Claim(
            f"{_GODEY}, sec. 4.3",
            "Queries and keys become longer as the norm of the bias grows.",
            f"{decades} the mean norm of queries and of keys, the lesser of both",
            lambda tables: min(map(_growth, _of_queries_and_keys(tables, "mean_norm"))),
            ("vectors",),
            bound=_DOUBLED,
        ),
        Claim(
            f"{_GODEY}, sec. 4.3",
            "Queries and keys are anisotropic even without bias.",
            "average cosine without bias, the lesser of queries and keys, minus the isotropic 95th percentile",
            lambda tables: (
                min(cosines.get(0.0, math.nan) for cosines in _of_queries_and_keys(tables, "cosine"))
                - isotropic_cosine_quantile(head_width)
            ),
            ("vectors",),
        ),
        Claim(
            f"{_GODEY}, sec. 4.4",
            "In each row of attention, the largest weight rises and the smallest falls.",
            f"{decades} the distance of both from the median weight, the lesser of both",
            _spread_growth("row"),
            ("attention",),
            bound=_DOUBLED,
        ),
        Claim(
            f"{_GODEY}, sec. 4.4",
            "Over whole sequences too, the largest weight rises and the smallest falls.",
            f"{decades} the distance of both from the median weight of rows, the lesser of both",
            _spread_growth("sequence"),
            ("attention",),
            bound=_DOUBLED,
        ),
        Claim(
            f"{_GODEY}, sec. 4.4",
            "Attention becomes less entropic.",
            f"{decades} what rows lack to the largest entropy",
            lambda tables: _growth(_by_norm(tables["attention"], "divergence")),
            ("attention",),
            bound=_DOUBLED,
        ),
        Claim(
            f"{_GODEY}, sec. 4.4",
            "The effect is not very important where the norm of the bias is low.",
            "a tenth, minus the share of the change of entropy that is there at a tenth of the largest norm",
            lambda tables: 0.1 - _early_sharpening(tables),
            ("attention",),
        ),
    ]


def verdicts_by_architecture(claims: Iterable[Claim], tables: TableSet) -> pd.DataFrame:
    """The verdicts on untrained blocks: the sample is the seeds.

    Args:
        claims: whose statistics read the tables of one draw.
        tables: of ``untrained.sweep``, and ``fixed_points``, whichever the claims need.

    Returns:
        The columns of ``verdicts_by_model``, with architectures as models. A value is the mean over seeds, and its
        interval Student's.
    """
    claims = list(claims)
    known = next(iter(tables.values()))[DRAW].drop_duplicates()
    found = {}
    for architecture, seeds in known.groupby("architecture", sort=False):
        values = []
        for draw in seeds.itertuples(index=False):
            one = {name: table[(table[DRAW] == [*draw]).all(axis=1)] for name, table in tables.items()}
            values.append([claim.statistic(one) for claim in claims])
        value, low, high = np.transpose([seed_interval(column) for column in zip(*values, strict=True)])
        found[architecture] = _decided(claims, value, low, high)
    return pd.concat(found, names=["model"]).reset_index("model").reset_index(drop=True)


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


# Layers that the figures of section 5 and appendix D show, of the 12 of a MultiBERT, here counted from 1.
_SHOWN_LAYERS = {13: (1, 5, 10, 12), 23: (1, 3, 7, 12)}


def layers_of_figure(figure: int, depth: int) -> list[int]:
    """The attention layers of Figure 13 or 23, and those as deep in a model of another depth.

    >>> layers_of_figure(13, 12), layers_of_figure(23, 6)
    ([1, 5, 10, 12], [1, 2, 4, 6])
    """
    return sorted({1 + round((layer - 1) / 11 * (depth - 1)) for layer in _SHOWN_LAYERS[figure]})


# Steps, sequences of a batch and tokens of a sequence (Sellam et al. 2022, sec. 2).
MULTIBERTS_TOKENS = 2_000_000 * 256 * 512

# A value and the ends of its interval.
Estimate = tuple[float, float, float]
# Section, statement, quantity, bound and what was found.
_RunClaim = tuple[str, str, str, float, Estimate]


def _share(held: pd.Series) -> Estimate:
    """The share of what is true, with Wilson's interval; missing where there is nothing."""
    if held.empty:
        return (math.nan,) * 3
    return float(held.mean()), *wilson(int(held.sum()), len(held))


def _mean_difference(greater: pd.Series, less: pd.Series) -> Estimate:
    """The difference of two means, with Welch's interval; missing where one of them has a single value."""
    value = float(greater.mean() - less.mean())
    if min(len(greater), len(less)) < 2:
        return value, math.nan, math.nan
    interval = stats.ttest_ind(greater, less, equal_var=False).confidence_interval(0.95)
    return value, float(interval.low), float(interval.high)


def _seeds_agree(found: Dynamics) -> Estimate:
    """The mean over layers of the correlation, over steps, of the cosines of two seeds; its interval is Student's."""
    wide = cosine_of_layers(found).pivot(index="step", columns=["seed", "layer"], values="cosine")
    pairs = itertools.combinations(found.seeds, 2)
    by_layer = pd.DataFrame([wide[one].corrwith(wide[other]) for one, other in pairs])
    value, *ends = seed_interval(by_layer.mean().dropna())
    return value, *np.clip(ends, -1.0, 1.0)


def godey_training_verdicts(found: Dynamics) -> pd.DataFrame:
    """The verdicts on the claims of section 5 and appendix D on a run of training.

    The sample is the heads, or the layers, of all seeds. Shares have Wilson's interval, means Student's, and the
    difference of two means Welch's. A run of one seed says nothing about appendix D, and has no row for it.

    Returns:
        The columns of ``verdicts``.
    """
    ends = found["qk_alignment"].assign(part=lambda table: thirds(table, found))
    keys, (start, end) = ["seed", "layer", "head"], (found.steps[0], found.steps[-1])
    last = ends[ends["step"] == end]
    cosine = {part: group["cosine"] for part, group in last.groupby("part")}
    dots = ends.pivot(index=keys, columns="step", values="dot").abs()
    entropy = found["attention_entropy"].assign(part=lambda table: thirds(table, found))
    by_layer = entropy.groupby(["seed", "layer", "step"])["entropy_nats"].mean().unstack()
    sharp = {part: group["entropy_nats"] for part, group in entropy[entropy["step"] == end].groupby("part")}
    first_third, last_third, section = cosine["first third"], cosine["last third"], "sec. 5"
    band = chance_band(found.head_width)
    claims: list[_RunClaim] = [
        (
            section,
            "Mean query and mean key align in almost all heads, in a common direction or in opposite ones.",
            "share of all heads with |cos| outside of the 99 % band at the last step",
            0.9,
            _share(last["cosine"].abs() > band),
        ),
        (
            section,
            "In the first layers, mean queries and mean keys align more than chance would have it.",
            "share of the heads of the first third of the layers with |cos| outside of the 99 % band at the last step",
            0.5,
            _share(first_third.abs() > band),
        ),
        (
            section,
            "In the first layers, mean queries and mean keys drift in a common direction.",
            "mean cosine over the heads of the first third of the layers at the last step",
            0.0,
            seed_interval(first_third),
        ),
        (
            section,
            "In the last layers, mean queries and mean keys drift in opposite directions.",
            "minus the mean cosine over the heads of the last third of the layers at the last step",
            0.0,
            seed_interval(-last_third),
        ),
        (
            section,
            "The scalar product of mean query and mean key grows in magnitude.",
            "share of heads in which it is greater at the last step than at the first",
            0.5,
            _share(dots[end] > dots[start]),
        ),
        (
            section,
            "Attention becomes sharper along training, in all layers.",
            "share of layers with a lower mean entropy at the last step than at the first",
            0.5,
            _share(by_layer[end] < by_layer[start]),
        ),
        (
            section,
            "The first layers end sharper than the last ones.",
            "mean entropy of the heads of the last third of the layers minus that of the first, in nats, last step",
            0.0,
            _mean_difference(sharp["last third"], sharp["first third"]),
        ),
    ]
    if len(found.seeds) > 1:
        claims.append(
            (
                "app. D",
                "The alignment of a layer follows similar trends in all seeds.",
                "correlation over steps of the cosines of two seeds, heads concatenated, mean over layers and pairs",
                0.0,
                _seeds_agree(found),
            )
        )
    return _of_run(claims)


def godey_direction_verdicts(found: Dynamics) -> pd.DataFrame:
    """The verdicts on the claims of section 5 and appendix C on the directions of queries and keys.

    They are about the two heads that are shown, and have no interval: the number decides alone.

    Returns:
        The columns of ``verdicts``.
    """
    drift = pd.concat([drift_along(found, shown) for shown in heads_shown(found["qk_alignment"])])
    drift = drift.groupby("of")[["query_share", "key_share"]].min()
    # A share is the square of a cosine: a direction that has nothing to do with the drift holds less, 99 times of 100.
    chance = chance_band(found.head_width) ** 2
    alone = {
        "sec. 5": (
            "The first direction of queries and keys describes the drift that they have in common.",
            "share of the squared move of the mean, from the first step to the last, along the first direction: the "
            "least of query and key in the two heads shown",
            0.5,
            drift.loc["both"].min(),
        ),
        "app. C": (
            "The first direction of the keys alone is relevant to the drift of the queries, and the reverse.",
            "share of the squared move of the mean of the one along the first direction of the other: the least of "
            "both in the two heads shown",
            chance,
            min(drift.loc["key", "query_share"], drift.loc["query", "key_share"]),
        ),
    }
    table = _of_run([(source, *told, (value,) * 3) for source, (*told, value) in alone.items()])
    return table.assign(ci_low=math.nan, ci_high=math.nan)


def _of_run(claims: Iterable[_RunClaim]) -> pd.DataFrame:
    rows = [
        (statement, f"{_GODEY}, {source}", quantity, *estimate, bound, verdict(*estimate[1:], bound))
        for source, statement, quantity, bound, estimate in claims
    ]
    names = ["claim", "source", "quantity", "value", "ci_low", "ci_high", "bound", "verdict"]
    return pd.DataFrame(rows, columns=names)


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
    "MULTIBERTS_TOKENS",
    "Claim",
    "agreement",
    "compare_table1",
    "compare_with_untrained",
    "contributions_by_key_type",
    "dominated_heads",
    "explained_gap",
    "godey_block_claims",
    "godey_claims",
    "godey_convolution_claims",
    "godey_direction_verdicts",
    "godey_fixed_point_claims",
    "godey_training_verdicts",
    "is_published_model",
    "layers_of_figure",
    "outlier_share",
    "published",
    "representative_layers",
    "tested_layers",
    "training_effect",
    "verdict",
    "verdicts",
    "verdicts_by_architecture",
    "verdicts_by_model",
]
