"""Godey et al. (2024), section 4: an untrained block under a growing bias."""

import math
from collections.abc import Callable, Iterable

import numpy as np
import pandas as pd

from analysis_lib.measurement.tables import grouped
from analysis_lib.metrics.anisotropy import isotropic_cosine_quantile
from analysis_lib.metrics.intervals import seed_interval
from analysis_lib.papers.godey.untrained import DRAW, of_draw
from analysis_lib.papers.old_claims import Claim, TableSet, decided

GODEY = "Godey et al. 2024"


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

    section = f"{GODEY}, sec. 4.2"
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
            f"{GODEY}, sec. 4.3",
            "Scores before the softmax move away from zero as the norm of the bias grows.",
            f"{decades} the mean of |score|",
            lambda tables: _growth(_by_norm(tables["attention"], "score_magnitude")),
            ("attention",),
            bound=_DOUBLED,
        ),
        Claim(
            f"{GODEY}, sec. 4.3",
            "Queries and keys become longer as the norm of the bias grows.",
            f"{decades} the mean norm of queries and of keys, the lesser of both",
            lambda tables: min(map(_growth, _of_queries_and_keys(tables, "mean_norm"))),
            ("vectors",),
            bound=_DOUBLED,
        ),
        Claim(
            f"{GODEY}, sec. 4.3",
            "Queries and keys are anisotropic even without bias.",
            "average cosine without bias, the lesser of queries and keys, minus the isotropic 95th percentile",
            lambda tables: (
                min(cosines.get(0.0, math.nan) for cosines in _of_queries_and_keys(tables, "cosine"))
                - isotropic_cosine_quantile(head_width)
            ),
            ("vectors",),
        ),
        Claim(
            f"{GODEY}, sec. 4.4",
            "In each row of attention, the largest weight rises and the smallest falls.",
            f"{decades} the distance of both from the median weight, the lesser of both",
            _spread_growth("row"),
            ("attention",),
            bound=_DOUBLED,
        ),
        Claim(
            f"{GODEY}, sec. 4.4",
            "Over whole sequences too, the largest weight rises and the smallest falls.",
            f"{decades} the distance of both from the median weight of rows, the lesser of both",
            _spread_growth("sequence"),
            ("attention",),
            bound=_DOUBLED,
        ),
        Claim(
            f"{GODEY}, sec. 4.4",
            "Attention becomes less entropic.",
            f"{decades} what rows lack to the largest entropy",
            lambda tables: _growth(_by_norm(tables["attention"], "divergence")),
            ("attention",),
            bound=_DOUBLED,
        ),
        Claim(
            f"{GODEY}, sec. 4.4",
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
            one = {name: of_draw(table, draw) for name, table in tables.items()}
            values.append([claim.statistic(one) for claim in claims])
        value, low, high = np.transpose([seed_interval(column) for column in zip(*values, strict=True)])
        found[architecture] = decided(claims, value, low, high)
    return grouped(found, "model")
