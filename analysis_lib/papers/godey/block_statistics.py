"""The numbers that decide claims on untrained blocks (Godey et al. 2024, sec. 4), each of one block, and over seeds.

The statistics read the tables of :func:`~analysis_lib.papers.godey.bias_sweep.sweep` and
:func:`~analysis_lib.papers.godey.fixed_point.fixed_points`, the rows of one draw. Factors are in decades, log10, since
the mean over seeds of a factor is not symmetric.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from analysis_lib.measurement import grouped
from analysis_lib.metrics.anisotropy import isotropic_cosine_quantile
from analysis_lib.metrics.intervals import seed_interval
from analysis_lib.papers.claims import Statistic, TableSet, verdicts_of_estimates
from analysis_lib.papers.godey.untrained_block import DRAW_COLUMNS


def over_seeds(table: pd.DataFrame, column: str, by: Sequence[str] = ("bias_norm",)) -> pd.DataFrame:
    """The mean of a column over the heads of each draw, then over draws, with its 95 % interval over draws.

    Returns:
        Columns architecture, those of ``by``, then value, ci_low, ci_high.
    """
    by = ["architecture", *by]
    each = table.groupby([*by, *DRAW_COLUMNS[1:]], sort=False)[column].mean()
    rows = [(*keys, *seed_interval(values)) for keys, values in each.groupby(by, sort=False)]
    return pd.DataFrame(rows, columns=[*by, "value", "ci_low", "ci_high"])


def verdicts_by_architecture(statistics: Mapping[str, Statistic], tables: TableSet) -> pd.DataFrame:
    """The verdicts on untrained blocks. A value is the mean over seeds, and its interval Student's.

    Args:
        statistics: by the id of a claim, what computes its number from the tables of one draw.
        tables: those that the statistics read, of the same draws.

    Returns:
        The columns of ``claims.verdicts_by_model``, with architectures as models.
    """
    draws = {name: dict(iter(table.groupby(DRAW_COLUMNS, sort=False))) for name, table in tables.items()}
    rows = []
    for draw in next(iter(draws.values())):
        one = {name: tables_by_draw[draw] for name, tables_by_draw in draws.items()}
        rows.append({"architecture": draw[0]} | {claim: statistic(one) for claim, statistic in statistics.items()})
    values = pd.DataFrame(rows).groupby("architecture", sort=False)
    found = {
        architecture: verdicts_of_estimates({claim: seed_interval(seeds[claim]) for claim in statistics})
        for architecture, seeds in values
    }
    return grouped(found, "model")


# --- Inputs and outputs ---------------------------------------------------------------------------


def _by_norm(table: pd.DataFrame, column: str) -> pd.Series:
    """The mean of a column over heads, by the norm of the bias, in its order."""
    return table.groupby("bias_norm")[column].mean()


def _hidden_by_norm(tables: TableSet, layer: int, column: str) -> pd.Series:
    return _by_norm(tables["vectors"].query("space == 'hidden' and layer == @layer"), column)


def least_narrowing(tables: TableSet) -> float:
    """(1 − average cosine of inputs) / (1 − average cosine of outputs), at the norm of the bias where it is least.

    Above 1, outputs lie in a narrower cone than inputs at every norm. Near a cosine of 1 a difference says little,
    and this factor says as much as elsewhere.
    """
    inputs, outputs = (1 - _hidden_by_norm(tables, layer, "cosine") for layer in (0, 1))
    return float((inputs / outputs).min())


def least_rise_of_mean(tables: TableSet) -> float:
    """The least rise of the norm of the mean output, ‖E T(x + b)‖, from one norm of the bias to the next."""
    return float(_hidden_by_norm(tables, 1, "norm_of_mean").diff().min())


def fixed_point_margin(tables: TableSet) -> float:
    """How clearly the difference of lengths changes its sign: above 0, there is a fixed point.

    The lesser of two: how much longer outputs are than inputs without bias, and inputs than outputs at the largest
    norm of the search.
    """
    (found,) = tables["fixed_points"].itertuples()
    return min(found.excess, -found.excess_at_highest)


def decades_from(tables: TableSet, norm: float) -> float:
    """How far the fixed point lies from a norm: ``|log10(N* / norm)|``; NaN where there is no fixed point."""
    (found,) = tables["fixed_points"]["fixed_point"]
    return abs(math.log10(found / norm))


# --- Attention ------------------------------------------------------------------------------------


def _decades(values: pd.Series) -> float:
    return math.log10(values.iloc[-1] / values.iloc[0])


def growth(tables: TableSet, column: str) -> float:
    """By how many decades a column of ``attention`` grows from the smallest norm of the bias to the largest.

    ``score_magnitude`` is the mean of the scores' absolute values; ``divergence`` is how far the rows' entropy falls
    below its maximum, ln n.
    """
    return _decades(_by_norm(tables["attention"], column))


def _queries_and_keys(tables: TableSet, column: str) -> list[pd.Series]:
    vectors = tables["vectors"]
    return [_by_norm(vectors[vectors["space"] == space], column) for space in ("query", "key")]


def growth_of_queries_and_keys(tables: TableSet) -> float:
    """The decades by which the mean norm grows from the smallest norm of the bias to the largest.

    The lesser of that of queries and that of keys.
    """
    return min(map(_decades, _queries_and_keys(tables, "mean_norm")))


def anisotropy_without_bias(tables: TableSet, head_width: int) -> float:
    """The average cosine of queries, or of keys where it is less, minus the 95th percentile of isotropic directions.

    NaN where the block was not run without bias.
    """
    cosines = [by_norm.get(0.0, math.nan) for by_norm in _queries_and_keys(tables, "cosine")]
    return min(cosines) - isotropic_cosine_quantile(head_width)


def growth_of_spread(tables: TableSet, extent: str) -> float:
    """The decades by which the largest and the smallest weight move away from the median weight of a row.

    From the smallest norm of the bias to the largest; the lesser of both.

    Args:
        tables: of one draw, with ``attention``.
        extent: ``row`` for the extremes of rows, or ``sequence`` for those of whole sequences.
    """
    columns = (f"{extent}_max", f"{extent}_min", "row_median")
    largest, smallest, median = (_by_norm(tables["attention"], column) for column in columns)
    return min(_decades(largest - median), _decades(median - smallest))


def early_share_of_sharpening(tables: TableSet) -> float:
    """The share of the whole change of entropy that is there at a tenth of the largest norm of the bias.

    Between two norms the entropy is read off a straight line.
    """
    divergence = _by_norm(tables["attention"], "divergence")
    tenth = np.interp(divergence.index[-1] / 10, divergence.index, divergence)
    return float((tenth - divergence.iloc[0]) / (divergence.iloc[-1] - divergence.iloc[0]))
