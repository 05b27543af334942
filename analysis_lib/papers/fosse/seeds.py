"""Fosse et al. (2023), sections 2.2 and 4: classifiers of self-attention alone."""

import math
from collections.abc import Callable

import numpy as np
import pandas as pd
from scipy import stats

from analysis_lib.measurement.measuring import grouped
from analysis_lib.metrics.intervals import seed_interval
from analysis_lib.papers.claims import published
from analysis_lib.papers.old_claims import Estimate, EstimatedClaim, estimated

FOSSE = "Fosse et al. 2023"
# How far below the published accuracy ours may lie.
MARGIN = 0.03
# Attention has become sparse where its entropy is below this share of that without a weight on it.
SPARSE = 0.9


def published_accuracies(model: str) -> pd.DataFrame:
    """Table 1 of a model, ``bert-finetuned`` or ``self-attention-1-layer``: dataset, published (a share)."""
    table = published("fosse_table1_accuracy")
    table = table[table["model"] == model].rename(columns={"accuracy_percent": "published"})
    return table.assign(published=table["published"] / 100)[["dataset", "published"]].reset_index(drop=True)


def published_depths() -> pd.DataFrame:
    """Table 3: dataset, layers (how many there are), layer, quantity (key or value), published."""
    names = {"depth": "layers", "space": "quantity", "mean_similarity": "published"}
    table = published("fosse_table3_intra_similarity").rename(columns=names)
    return table[["dataset", "layers", "layer", "quantity", "published"]].astype({"layer": "Int64"})


def published_entropies() -> pd.DataFrame:
    """Table 4: dataset, entropy_weight, quantity (entropy, key or value), published."""
    table = published("fosse_table4_entropy_regularisation").rename(columns={"value": "published"})
    return table[["dataset", "entropy_weight", "quantity", "published"]].astype({"entropy_weight": float})


def _over_seeds(found: pd.DataFrame, statistic: Callable[[pd.DataFrame], float]) -> Estimate:
    """The mean over seeds of a number of one seed's rows, with its interval."""
    return seed_interval([statistic(rows) for _, rows in found.groupby("seed")])


def fosse_accuracy_verdicts(found: pd.DataFrame) -> pd.DataFrame:
    """Whether one layer reaches the accuracy of Table 1, for every dataset that it has.

    Args:
        found: from ``trials.trials_on``.

    Returns:
        The column dataset, then those of ``verdicts``; no row for other datasets.
    """
    printed = published_accuracies("self-attention-1-layer").set_index("dataset")["published"]
    one = found[(found["layers"] == 1) & (found["entropy_weight"] == 0) & (found["quantity"] == "accuracy")]
    frames = {}
    for dataset, rows in one.groupby("dataset", sort=False):
        if dataset in printed.index:
            claim = (
                "Table 1",
                f"One layer of self-attention reaches {100 * printed[dataset]:.1f} % accuracy, less three points.",
                "accuracy on the test set, mean over seeds",
                float(printed[dataset]) - MARGIN,
                seed_interval(rows["value"]),
            )
            frames[dataset] = estimated([claim], FOSSE)
    return grouped(frames, "dataset") if frames else estimated([], FOSSE).assign(dataset=[])


def fosse_depth_verdicts(found: pd.DataFrame) -> pd.DataFrame:
    """The claims of section 4.1 on keys and values by depth, for each dataset. The sample is the seeds.

    Args:
        found: from ``trials.trials_on``, with models of two layers or more.

    Returns:
        The column dataset, then those of ``verdicts``.
    """
    found = found[found["entropy_weight"] == 0]
    return grouped({name: _depth(rows) for name, rows in found.groupby("dataset", sort=False)}, "dataset")


def _depth(found: pd.DataFrame) -> pd.DataFrame:
    claims: list[EstimatedClaim] = []
    for space, plural in (("key", "Keys"), ("value", "Values")):
        similar = found[found["quantity"] == space]
        claims += [
            (
                "sec. 4.1",
                f"{plural} are more alike in the last layer than in the first.",
                "similarity in the last layer minus that in the first, mean over the models of two layers or more",
                0.0,
                _over_seeds(similar, _last_minus_first),
            ),
            (
                "sec. 4.1",
                f"{plural} of the last layer are more alike the more layers there are.",
                "similarity in the last layer of the deepest model minus that of the shallowest",
                0.0,
                _over_seeds(similar, _deepest_minus_shallowest),
            ),
        ]
    return estimated(claims, FOSSE)


def _last_layer(similar: pd.DataFrame) -> pd.Series:
    """The similarity in the last layer, by the number of layers."""
    return similar[similar["layer"] == similar["layers"]].set_index("layers")["value"].sort_index()


def _deepest_minus_shallowest(similar: pd.DataFrame) -> float:
    last = _last_layer(similar)
    return float(last.iloc[-1] - last.iloc[0]) if len(last) > 1 else math.nan


def _last_minus_first(similar: pd.DataFrame) -> float:
    last, first = _last_layer(similar), similar[similar["layer"] == 1].set_index("layers")["value"]
    return float((last - first).drop(1, errors="ignore").mean())


def fosse_entropy_verdicts(found: pd.DataFrame) -> pd.DataFrame:
    """The claims of section 4.2 on the weight of entropy, for each dataset. The sample is the seeds.

    What the model does with sparse attention is undecided where attention has not become sparse.

    Args:
        found: from ``trials.trials_on``, with one layer and two weights or more, 0 among them.

    Returns:
        The column dataset, then those of ``verdicts``.
    """
    found = found[found["layers"] == 1]
    return grouped({name: _entropy(rows) for name, rows in found.groupby("dataset", sort=False)}, "dataset")


def _entropy(found: pd.DataFrame) -> pd.DataFrame:
    def by_weight(rows: pd.DataFrame, quantity: str) -> pd.Series:
        return rows[rows["quantity"] == quantity].set_index("entropy_weight")["value"].sort_index()

    def trend(rows: pd.DataFrame) -> float:
        values = by_weight(rows, "value")
        # Of values that are all the same it is not defined: they have no trend.
        return float(stats.spearmanr(values.index, values).statistic) if values.nunique() > 1 else 0.0

    def kept(quantity: str) -> Callable[[pd.DataFrame], float]:
        """At the largest weight, over that without."""
        return lambda rows: float(by_weight(rows, quantity).iloc[-1] / by_weight(rows, quantity).loc[0.0])

    def change(rows: pd.DataFrame) -> float:
        return abs(np.log(kept("key_norm")(rows))) - abs(np.log(max(kept("key")(rows), 1e-9)))

    def loss(rows: pd.DataFrame) -> float:
        accuracies = by_weight(rows, "accuracy")
        return float(accuracies.iloc[-1] - accuracies.loc[0.0])

    sparse = _over_seeds(found, kept("entropy"))[0] < SPARSE

    def if_sparse(statistic: Callable[[pd.DataFrame], float]) -> Estimate:
        value, low, high = _over_seeds(found, statistic)
        return (value, low, high) if sparse else (value, math.nan, math.nan)

    claims: list[EstimatedClaim] = [
        (
            "sec. 4.2",
            "The entropy of attention falls as its weight in the loss rises.",
            "1 − entropy at the largest weight, over that without",
            1 - SPARSE,
            _over_seeds(found, lambda rows: 1 - kept("entropy")(rows)),
        ),
        (
            "sec. 4.2",
            "Values grow more alike as the weight rises.",
            "rank correlation with the weight",
            0.0,
            if_sparse(trend),
        ),
        (
            "sec. 4.2",
            "Keys do not become orthogonal.",
            "similarity of the keys at the largest weight, over that without",
            0.5,
            if_sparse(kept("key")),
        ),
        (
            "sec. 4.2",
            "The model plays on the norm of the keys.",
            "mean norm of the keys at the largest weight, over that without",
            1.0,
            if_sparse(kept("key_norm")),
        ),
        (
            "sec. 4.2",
            "It does so more than on their direction.",
            "|ln| of that ratio of norms minus |ln| of the ratio of similarities",
            0.0,
            if_sparse(change),
        ),
        (
            "sec. 4.2",
            "Sparse attention costs no accuracy.",
            "accuracy at the largest weight minus that without",
            -MARGIN,
            if_sparse(loss),
        ),
    ]
    return estimated(claims, FOSSE)


def fosse_sensitivity_verdicts(found: pd.DataFrame) -> pd.DataFrame:
    """Whether training makes keys and values of one layer alike, for each variant of what the paper leaves open.

    Args:
        found: from ``trials.sensitivity``.

    Returns:
        The column variant, then those of ``verdicts``.
    """
    found = found[(found["layers"] == 1) & found["quantity"].isin(["key", "value"])]
    frames = {}
    for variant, rows in found.groupby("variant", sort=False):
        wide = rows.pivot(index=["quantity", "seed"], columns="stage", values="value")
        gains = wide["trained"] - wide["untrained"]
        claims: list[EstimatedClaim] = [
            (
                "sec. 4.1",
                f"Self-attention builds the convergence of the {space}s of an utterance.",
                "similarity after training minus that before",
                0.0,
                seed_interval(gains[space]),
            )
            for space in ("key", "value")
        ]
        frames[variant] = estimated(claims, FOSSE)
    return grouped(frames, "variant")
