"""Godey et al. (2024), section 3: anisotropy of trained models, beside their untrained twins."""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from analysis_lib.metrics.anisotropy import isotropic_cosine_quantile


def isotropic_excess(tables: Mapping[str, pd.DataFrame], widths: Mapping[int, int]) -> float:
    """How far the average cosine rises above what isotropy gives, in the layer where it rises farthest.

    It is the largest, over the layers, of the average cosine of the hidden states minus the 95th percentile of the
    cosine of random directions in as many dimensions (Godey et al. 2024, app. B).

    Args:
        tables: with ``anisotropy``.
        widths: dimensions of the hidden states of each layer.

    Returns:
        Above 0 where a layer lies above the percentile; at most 1 minus the percentile.
    """
    table = tables["anisotropy"]
    hidden = table[table["space"] == "hidden"]
    return (hidden["cosine"] - [isotropic_cosine_quantile(int(widths[layer])) for layer in hidden["layer"]]).max()


def training_effect(anisotropy: pd.DataFrame) -> pd.DataFrame:
    """What training adds to the anisotropy of a model: one row per model that has an untrained twin.

    The errors of model and twin are added as if they were independent, which makes the interval of their difference
    too wide where the two read the same texts.

    Args:
        anisotropy: of the hidden states; columns model, trained, layer, cosine, ci_low, ci_high.

    Returns:
        Columns model; layers, and in how many of them training makes the average cosine more and less beyond the 95 %
        interval of the difference; then, of the layer where trained and untrained differ most: layer, trained and
        untrained (average cosines), difference, ci_low and ci_high.
    """
    columns = ["model", "layer", "cosine", "ci_low", "ci_high"]
    sides = (anisotropy.loc[anisotropy["trained"] == trained, columns] for trained in (True, False))
    pairs = pd.merge(*sides, on=["model", "layer"], suffixes=("", "_of_twin"))
    pairs = pairs.rename(columns={"cosine": "trained", "cosine_of_twin": "untrained"})
    difference = pairs["trained"] - pairs["untrained"]
    # Student's t of both is that of as many groups: half-widths add like standard errors.
    reach = np.hypot(pairs["ci_high"] - pairs["ci_low"], pairs["ci_high_of_twin"] - pairs["ci_low_of_twin"]) / 2
    pairs = pairs.assign(difference=difference, ci_low=difference - reach, ci_high=difference + reach)
    pairs = pairs.assign(more=pairs["ci_low"] > 0, less=pairs["ci_high"] <= 0)
    counts = pairs.groupby("model", sort=False).agg(
        layers=("layer", "size"), more=("more", "sum"), less=("less", "sum")
    )
    most = pairs.loc[difference.abs().groupby(pairs["model"], sort=False).idxmax()]
    greatest = most[["model", "layer", "trained", "untrained", "difference", "ci_low", "ci_high"]]
    return counts.reset_index().merge(greatest, on="model")
