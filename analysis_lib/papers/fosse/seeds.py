"""Numbers of several trainings: beside what the paper prints, and as verdicts on its claims (Fosse et al. 2023)."""

from collections.abc import Sequence

import pandas as pd

from analysis_lib.metrics.intervals import seed_interval
from analysis_lib.papers.claims import verdicts_of_estimates


def beside_published(found: pd.DataFrame, printed: pd.DataFrame, on: Sequence[str]) -> pd.DataFrame:
    """Numbers of several seeds beside published ones.

    Args:
        found: with the columns of ``on``, and value.
        printed: with the columns of ``on``, and published.
        on: what identifies a number, such as layers, layer and quantity.

    Returns:
        The columns of ``on``; mean and ``spread over seeds`` (the standard deviation), published, and ``difference in
        spreads``: how many spreads our mean lies above the published value, as text.
    """
    groups = found.groupby([*on], dropna=False)["value"]
    both = groups.agg(mean="mean", spread="std").reset_index().merge(printed, on=[*on], how="left")
    ratio = (both["mean"] - both["published"]) / both["spread"].where(both["spread"] > 0)
    # The spread of a few seeds does not carry more than one decimal of a ratio to it.
    difference = ["–" if pd.isna(number) else f"{number:+.1f}" for number in ratio]
    return both.rename(columns={"spread": "spread over seeds"}).assign(**{"difference in spreads": difference})


def verdicts(numbers: pd.DataFrame) -> pd.DataFrame:
    """The verdicts on claims whose number has one value per seed; 95 % intervals are over seeds.

    Args:
        numbers: one column per claim, called by its id, and one row per training; the last level of the index is the
            seed, and each value of the levels before, such as run and dataset, is judged for itself.

    Returns:
        These levels as columns, then those of ``claims.verdicts_of_estimates``.
    """
    *levels, _ = numbers.index.names
    groups = numbers.groupby(levels[0] if len(levels) == 1 else levels, sort=False)
    found = {name: verdicts_of_estimates(rows.apply(seed_interval).to_dict("list")) for name, rows in groups}
    return pd.concat(found, names=levels).reset_index(levels).reset_index(drop=True)
