"""Anisotropy of trained models, beside their untrained twins, and against drift.

Godey et al. 2024, section 3.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import pandas as pd
from scipy import stats

from analysis_book.papers.counts import Settled
from analysis_lib.capture import Activations, Vectors
from analysis_lib.corpora import Corpus
from analysis_lib.errors import AnalysisError
from analysis_lib.measurement import Plain, Tables, TableSet, measure
from analysis_lib.measurement.tables import LazyTables
from analysis_lib.metrics.accumulator import Metric
from analysis_lib.metrics.anisotropy import Anisotropy, isotropic_cosine_quantile
from analysis_lib.metrics.dimensions import DimensionMeans
from analysis_lib.metrics.intervals import Estimate
from analysis_lib.models import LoadedModel

# Over three layers, any order is one of six.
FEWEST_LAYERS = 4


class Centred(Anisotropy):
    """The average cosine of hidden states without a given mean: the table ``centred``.

    It is as that of ``anisotropy``. Without a mean of their own, vectors sum to zero whatever they
    are, which proves nothing; that of other texts or images says what is left once the common
    direction is gone (Godey et al. 2024, sec. 2).

    Args:
        means: of every hidden layer, as many numbers as a vector has.
    """

    name = "centred"
    needs = frozenset({"hidden"})

    def __init__(self, means: Mapping[int, np.ndarray]):
        super().__init__()
        self.means = means

    def vectors(self, activations: Activations) -> Iterator[tuple[str, Vectors]]:
        """The hidden states of a layer, less the mean that is given for it."""
        hidden = activations.spaces["hidden"]
        mean = hidden.values.new_tensor(self.means[activations.layer])
        yield "hidden", Vectors(hidden.values - mean, hidden.tokens)


class WithoutFirst(Metric):
    """A metric of hidden states that passes over the first token of each text.

    Many causal models make it hundreds of times as long as the others, so that it alone can decide
    the mean.
    """

    needs = frozenset({"hidden"})

    def update(self, activations: Activations) -> None:
        hidden = activations.spaces["hidden"]
        tokens = hidden.tokens
        silent = tokens.mask & (tokens.mask.cumsum(1) == 1)
        if tokens.silent is not None:
            silent = silent | tokens.silent
        rest = Vectors(hidden.values, replace(tokens, silent=silent))
        super().update(replace(activations, spaces={"hidden": rest}))


class AnisotropyWithoutFirst(WithoutFirst, Anisotropy):
    name = "anisotropy_without_first"


class CentredWithoutFirst(WithoutFirst, Centred):
    name = "centred_without_first"


class MeansWithoutFirst(WithoutFirst, DimensionMeans):
    name = "dimension_means_without_first"


def without_mean_of_others(model: LoadedModel, corpus: Corpus, **settings) -> Tables:
    """The average cosine in one half of a corpus, as it is and without the mean of the other half.

    The units of the corpus, such as articles or photographs, go to the two halves in turn.

    Args:
        settings: of :func:`~analysis_lib.measure`.

    Returns:
        The tables ``anisotropy`` and ``centred`` of :class:`Centred`, and of a text model both with
        ``_without_first``, which pass over the first token of each text, as does the mean.
    """
    names = corpus.units or range(len(corpus))
    units, _ = pd.factorize(pd.Series(names))
    others = corpus.take(np.flatnonzero(units % 2 == 0))
    half = corpus.take(np.flatnonzero(units % 2 == 1))
    kinds = [(DimensionMeans(), Anisotropy, Centred)]
    if model.kind == "text":
        kinds.append((MeansWithoutFirst(), AnisotropyWithoutFirst, CentredWithoutFirst))
    means_of_others = [means for means, *_ in kinds]
    of_others = measure(model, others, means_of_others, **settings)
    metrics = []
    for means, as_it_is, centred in kinds:
        table = of_others[means.name].query("token_type == 'all'")
        by_layer = table.groupby("layer")["mean"].apply(np.array)
        metrics.append(as_it_is())
        metrics.append(centred(by_layer.to_dict()))
    return measure(model, half, metrics, **settings)


def cosines(tables: LazyTables, name: str = "anisotropy") -> pd.Series:
    """The average cosine of the hidden states by layer.

    Args:
        tables: of one model.
        name: of the table: ``anisotropy``, or ``centred`` of :class:`Centred`.
    """
    hidden = tables[name].query("space == 'hidden'")
    return hidden.set_index("layer")["cosine"]


def isotropic_excess(tables: LazyTables, name: str = "anisotropy") -> pd.Series:
    """How far the average cosine of each layer rises above what isotropy gives.

    It is the average cosine of the hidden states minus the 95th percentile of the cosine of random
    directions in as many dimensions (Godey et al. 2024, app. B): at most 1 minus the percentile.

    Args:
        tables, name: as for :func:`cosines`.
    """
    widths = tables.layers.set_index("layer")["width"].dropna()
    return cosines(tables, name) - widths.map(isotropic_cosine_quantile)


def drift_correlation(table: pd.DataFrame) -> pd.DataFrame:
    """Whether the average cosine follows the norm of the mean vector over the layers of a model.

    Spearman's correlation of the ranks and Pearson's of the values, with two-sided p-values from
    Student's t (Godey et al. 2024, sec. 3.3 and app. A). Both take the layers for independent,
    which neighbours are not: read them as the paper's measure, not as proof.

    Args:
        table: columns model, layer, norm_of_mean, cosine; one row per layer.

    Returns:
        One row per model: model, layers (how many), spearman, spearman_p, pearson and pearson_p,
        which are NaN for two layers and for a constant.

    Raises:
        AnalysisError: a value is missing.
    """
    rows = []
    for model, part in table.groupby("model", sort=False):
        norm = part["norm_of_mean"].to_numpy(float)
        cosine = part["cosine"].to_numpy(float)
        finite = np.isfinite(norm) & np.isfinite(cosine)
        if not finite.all():
            layer = part["layer"].iloc[finite.argmin()]
            raise AnalysisError(
                f"{model} has no finite drift and cosine in layer {layer}: leave that layer out"
            )
        numbers = [math.nan] * 4
        both_vary = np.ptp(norm) and np.ptp(cosine)
        if len(part) > 2 and both_vary:
            of_ranks = stats.spearmanr(norm, cosine)
            of_values = stats.pearsonr(norm, cosine)
            numbers = [*of_ranks, *of_values]
        rows.append((model, len(part), *numbers))
    columns = ["model", "layers", "spearman", "spearman_p", "pearson", "pearson_p"]
    return pd.DataFrame(rows, columns=columns)


class LayerCorrelation(Plain):
    """A statistic of the layers of a model, which may be one of their ranks."""

    def judged(self, estimates: list[Estimate]) -> list[Estimate]:
        has_interval = [not math.isnan(estimate.ci_low) for estimate in estimates]
        pairs = zip(estimates, has_interval, strict=True)
        return [estimate if has else Settled(estimate.value) for estimate, has in pairs]


def follows_drift(test: str, magnitude: bool = False) -> LayerCorrelation:
    """How the average cosine follows the norm of the mean vector over the layers, by the texts.

    Neighbouring layers are not independent, so that nothing is inferred from their number: the
    layers are those of the model, and the interval is over texts. Where no text changes their
    order, a correlation of ranks has none, see :class:`~analysis_book.papers.counts.Settled`.

    Args:
        test: ``spearman`` or ``pearson``, of :func:`drift_correlation`.
        magnitude: take its magnitude.

    Returns:
        A statistic of the tables ``mean_vector`` and ``anisotropy``; of fewer than four layers it
        has no number.
    """

    def number(tables: TableSet) -> list[float]:
        cosines = tables["anisotropy"].query("space == 'hidden'")[["layer", "cosine"]]
        layers = tables["mean_vector"].query("space == 'hidden'").merge(cosines, on="layer")
        (row,) = drift_correlation(layers.assign(model="")).to_dict("records")
        value = row[test] if row["layers"] >= FEWEST_LAYERS else math.nan
        if magnitude:
            value = abs(value)
        return [value]

    return LayerCorrelation(number, smooth=test == "pearson")
