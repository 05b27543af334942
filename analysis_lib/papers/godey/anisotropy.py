"""Godey et al. (2024), section 3: anisotropy of trained models, beside their untrained twins."""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from analysis_lib.errors import AnalysisError
from analysis_lib.measurement import Comparison
from analysis_lib.metrics.anisotropy import isotropic_cosine_quantile
from analysis_lib.papers.claims import FAILS, HOLDS, UNDECIDED, verdict

# What section 3.2 calls very anisotropic, of every layer of every speech model.
VERY_ANISOTROPIC = 0.2

TableSet = Mapping[str, pd.DataFrame]


def _hidden(tables: TableSet) -> pd.DataFrame:
    """The anisotropy of the hidden states, by layer."""
    table = tables["anisotropy"]
    return table[table["space"] == "hidden"].set_index("layer")


def isotropic_excess(tables: TableSet, widths: Mapping[int, int]) -> float:
    """How far the average cosine rises above what isotropy gives, in the layer where it rises farthest.

    It is the largest, over the layers, of the average cosine of the hidden states minus the 95th percentile of the
    cosine of random directions in as many dimensions (Godey et al. 2024, app. B).

    Args:
        tables: with ``anisotropy``.
        widths: dimensions of the hidden states of each layer.

    Returns:
        Above 0 where a layer lies above the percentile; at most 1 minus the percentile.

    Raises:
        AnalysisError: the width of a layer is missing.
    """
    cosines = _hidden(tables)["cosine"]
    missing = [layer for layer in cosines.index if layer not in widths]
    if missing:
        raise AnalysisError(f"widths of layers {list(widths)} were given, and none of layer {missing[0]}: add it")
    quantiles = {width: isotropic_cosine_quantile(int(width)) for width in {widths[layer] for layer in cosines.index}}
    return (cosines - [quantiles[widths[layer]] for layer in cosines.index]).max()


def least_cosine(tables: TableSet) -> float:
    """The average cosine of the hidden states in the layer where it is least, in [-1, 1].

    Args:
        tables: with ``anisotropy``.
    """
    return _hidden(tables)["cosine"].min()


def margin_below_speech(tables: TableSet) -> float:
    """0.2, which every layer of the paper's speech models reaches, minus the largest average cosine of a layer.

    Args:
        tables: with ``anisotropy``.
    """
    return VERY_ANISOTROPIC - _hidden(tables)["cosine"].max()


def compare_with_untrained(trained: TableSet, untrained: TableSet) -> pd.DataFrame:
    """What training adds to the anisotropy of each layer: a trained model beside its twin with random weights.

    Args:
        trained, untrained: with ``anisotropy``, of the same corpus.

    Returns:
        Columns layer, trained and untrained (average cosine of the hidden states), difference, its 95 % interval, and
        more_anisotropic: whether training makes the layer so, as a verdict. The two errors are added as if they
        were independent, which makes the interval too wide where the twins read the same texts.

    Raises:
        AnalysisError: the two do not have the same layers.
    """
    ours, twin = (_hidden(tables)[["cosine", "ci_low", "ci_high"]] for tables in (trained, untrained))
    if list(ours.index) != list(twin.index):
        raise AnalysisError(
            f"the trained model has layers {list(ours.index)} and the untrained one {list(twin.index)}: "
            f"give a model and its own untrained twin"
        )
    difference = ours["cosine"] - twin["cosine"]
    # Student's t of both is that of as many groups: half-widths add like standard errors.
    reach = np.hypot(*((side["ci_high"] - side["ci_low"]) / 2 for side in (ours, twin)))
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


def training_effect(comparison: Comparison) -> pd.DataFrame:
    """What training adds to the anisotropy of a model: one row per model that has an untrained twin.

    Args:
        comparison: with ``anisotropy``.

    Returns:
        Columns model; layers, and in how many of them training makes the average cosine more, less or neither
        beyond its interval (undecided); then those of :func:`compare_with_untrained` in the layer where trained and
        untrained differ most.
    """
    greatest = ["layer", "trained", "untrained", "difference", "ci_low", "ci_high"]
    rows = []
    for model, twin in comparison.untrained.items():
        layers = compare_with_untrained(comparison.trained[model], twin)
        counts = [(layers["more_anisotropic"] == found).sum() for found in (HOLDS, FAILS, UNDECIDED)]
        most = layers.loc[layers["difference"].abs().idxmax(), greatest]
        rows.append((model, len(layers), *counts, int(most["layer"]), *most.iloc[1:]))
    return pd.DataFrame(rows, columns=["model", "layers", "more", "less", "undecided", *greatest])
