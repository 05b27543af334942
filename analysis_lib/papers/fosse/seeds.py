"""Numbers of several trainings: what the paper prints beside them, and what decides its claims (Fosse et al. 2023)."""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd
from scipy import stats

from analysis_lib.measurement import grouped
from analysis_lib.metrics.intervals import seed_interval
from analysis_lib.papers.claims import Estimate, published, verdicts_of_estimates

# Attention has become sparse where its entropy is below this share of that without a weight on it.
SPARSE = 0.9

# --- What the paper prints ----------------------------------------------------------------------------


def published_accuracies(model: str) -> pd.DataFrame:
    """Table 1 of a model, ``bert-finetuned`` or ``self-attention-1-layer``: dataset, published (a share)."""
    table = published("fosse_table1_accuracy").query("model == @model")
    return table.assign(published=table["accuracy_percent"] / 100)[["dataset", "published"]].reset_index(drop=True)


def published_depths() -> pd.DataFrame:
    """Table 3: dataset, layers (how many there are), layer, quantity (key or value), published."""
    names = {"depth": "layers", "space": "quantity", "mean_similarity": "published"}
    table = published("fosse_table3_intra_similarity").rename(columns=names)
    return table[["dataset", "layers", "layer", "quantity", "published"]].astype({"layer": "Int64"})


def published_entropies() -> pd.DataFrame:
    """Table 4: dataset, entropy_weight, quantity (entropy, key or value), published."""
    table = published("fosse_table4_entropy_regularisation").rename(columns={"value": "published"})
    return table[["dataset", "entropy_weight", "quantity", "published"]].astype({"entropy_weight": float})


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


# --- Verdicts -----------------------------------------------------------------------------------------

# Of the rows of one seed.
SeedStatistic = Callable[[pd.DataFrame], float]


def over_seeds(found: pd.DataFrame, statistic: SeedStatistic) -> Estimate:
    """The mean over seeds of a number computed from the rows of one seed, with its 95 % interval."""
    return seed_interval([statistic(rows) for _, rows in found.groupby("seed")])


def verdicts(
    found: pd.DataFrame,
    statistics: Mapping[str, SeedStatistic],
    group: str = "dataset",
    decidable: Callable[[str, pd.DataFrame], bool] = lambda claim, rows: True,
) -> pd.DataFrame:
    """The verdicts on claims whose number has one value per seed; intervals are over seeds.

    Args:
        found: from ``trials``.
        statistics: by the id of a claim, what computes its number from the rows of one seed.
        group: the column whose values are judged each for itself.
        decidable: whether the rows of a group can decide a claim; where not, it has no interval and is undecided.

    Returns:
        The column ``group``, then those of ``claims.verdicts_of_estimates``.
    """
    frames = {}
    for name, rows in found.groupby(group, sort=False):
        estimates = {claim: over_seeds(rows, statistic) for claim, statistic in statistics.items()}
        for claim in statistics:
            if not decidable(claim, rows):
                estimates[claim] = (estimates[claim][0], math.nan, math.nan)
        frames[name] = verdicts_of_estimates(estimates)
    return grouped(frames, group)


def _last_layer(rows: pd.DataFrame, space: str) -> pd.Series:
    """The similarity in the last layer, by the number of layers."""
    return rows[(rows["quantity"] == space) & (rows["layer"] == rows["layers"])].set_index("layers")["value"]


def last_minus_first(rows: pd.DataFrame, space: str) -> float:
    """The similarity of keys or values in the last layer minus that in the first, mean over models of two or more."""
    first = rows[(rows["quantity"] == space) & (rows["layer"] == 1)].set_index("layers")["value"]
    return float((_last_layer(rows, space) - first).drop(1, errors="ignore").mean())


def deepest_minus_shallowest(rows: pd.DataFrame, space: str) -> float:
    """The similarity of keys or values in the last layer of the deepest model minus that of the shallowest."""
    last = _last_layer(rows, space).sort_index()
    return float(last.iloc[-1] - last.iloc[0]) if len(last) > 1 else math.nan


def by_weight(rows: pd.DataFrame, quantity: str) -> pd.Series:
    """A quantity of the models of one layer by the weight of entropy in the loss, in ascending order."""
    return rows[rows["quantity"] == quantity].set_index("entropy_weight")["value"].sort_index()


def kept(rows: pd.DataFrame, quantity: str) -> float:
    """A quantity at the largest weight of entropy, divided by that without a weight."""
    values = by_weight(rows, quantity)
    return float(values.iloc[-1] / values.loc[0.0])


def trend(rows: pd.DataFrame, quantity: str) -> float:
    """Spearman's rank correlation of a quantity with the weight of entropy; 0 where the quantity is constant."""
    values = by_weight(rows, quantity)
    return float(stats.spearmanr(values.index, values).statistic) if values.nunique() > 1 else 0.0


def norm_over_direction(rows: pd.DataFrame) -> float:
    """|ln| of the ratio :func:`kept` of the norms of keys, minus |ln| of that of their similarities."""
    return abs(np.log(kept(rows, "key_norm"))) - abs(np.log(max(kept(rows, "key"), 1e-9)))


def accuracy_gain(rows: pd.DataFrame) -> float:
    """The accuracy at the largest weight of entropy minus that without a weight."""
    values = by_weight(rows, "accuracy")
    return float(values.iloc[-1] - values.loc[0.0])


def is_sparse(rows: pd.DataFrame) -> bool:
    """Whether the largest weight takes the entropy, mean over seeds, below nine tenths of that without a weight."""
    return over_seeds(rows, lambda seed: kept(seed, "entropy"))[0] < SPARSE


def training_gain(rows: pd.DataFrame, space: str) -> float:
    """The similarity of keys or values in the first layer after training minus that before."""
    stages = rows[rows["quantity"] == space].set_index("stage")["value"]
    return stages["trained"] - stages["untrained"]
