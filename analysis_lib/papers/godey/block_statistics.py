"""What untrained blocks show (Godey et al. 2024, sec. 4), over the seeds of each architecture."""

from collections.abc import Mapping, Sequence

import pandas as pd

from analysis_lib.measurement import grouped
from analysis_lib.metrics.intervals import seed_interval
from analysis_lib.papers.claims import verdicts_of_estimates
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


def by_norm(table: pd.DataFrame, column: str) -> pd.DataFrame:
    """The mean of a column over the heads of each draw: one row per draw, one column per norm of the bias, ascending.

    Args:
        table: of :func:`~analysis_lib.papers.godey.bias_sweep.sweep`; of ``vectors``, the rows of one space and layer.
        column: one of its columns.
    """
    return table.pivot_table(column, DRAW_COLUMNS, "bias_norm", sort=False).sort_index(axis=1)


def verdicts_by_architecture(statistics: Mapping[str, pd.Series]) -> pd.DataFrame:
    """The verdicts on untrained blocks. A value is the mean over seeds, and its interval Student's.

    Args:
        statistics: by the id of a claim, the number that decides it in each draw, indexed by ``DRAW_COLUMNS``.

    Returns:
        The columns of ``claims.verdicts_by_model``, with architectures as models.
    """
    architectures = next(iter(statistics.values())).index.unique("architecture")
    found = {}
    for name in architectures:
        estimates = {claim: seed_interval(draws.loc[name]) for claim, draws in statistics.items()}
        found[name] = verdicts_of_estimates(estimates)
    return grouped(found, "model")
