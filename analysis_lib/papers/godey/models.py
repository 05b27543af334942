"""Godey et al. (2024), section 3: anisotropy and drift of trained models, beside their untrained twins."""

import math
from collections.abc import Callable, Mapping
from numbers import Integral

import numpy as np
import pandas as pd

from analysis_lib.errors import AnalysisError
from analysis_lib.measurement.comparison import Comparison
from analysis_lib.metrics.anisotropy import isotropic_cosine_quantile
from analysis_lib.papers.godey.drift import SIGNIFICANCE, drift_by_layer, drift_correlation
from analysis_lib.papers.old_claims import FAILS, HOLDS, UNDECIDED, Claim, TableSet, verdict

GODEY = "Godey et al. 2024"
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
            f"{GODEY}, sec. 3.1 and app. B",
            "The model displays a significant level of anisotropy in at least one of its layers.",
            "largest average cosine of a layer minus the 95th percentile of the cosine in an isotropic space",
            _excess_over_isotropy(width),
            ("anisotropy",),
        )
    ]


GODEY_SPEECH = [
    Claim(
        f"{GODEY}, sec. 3.2",
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
            f"{GODEY}, sec. 3.2",
            "Most convolution-based models are isotropic (strictly: no layer rises above an isotropic cloud).",
            "least distance of a layer's average cosine below the 95th percentile of the cosine in an isotropic space",
            lambda tables: -excess(tables),
            ("anisotropy",),
        ),
        Claim(
            f"{GODEY}, sec. 3.2",
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
        f"{GODEY}, {section}",
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
