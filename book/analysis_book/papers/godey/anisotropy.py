"""Anisotropy of trained models, beside their untrained twins, and against drift (Godey et al. 2024,
section 3).
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import pandas as pd
from scipy import stats

from analysis_lib.capture import Activations, Vectors
from analysis_lib.corpora import Corpus
from analysis_lib.errors import AnalysisError
from analysis_lib.measurement import Comparison, Tables, measure
from analysis_lib.measurement.tables import LazyTables
from analysis_lib.metrics.accumulator import Metric
from analysis_lib.metrics.anisotropy import Anisotropy, isotropic_cosine_quantile
from analysis_lib.metrics.dimensions import DimensionMeans
from analysis_lib.metrics.intervals import Estimate, seed_and_unit_interval
from analysis_lib.models import LoadedModel


class Centred(Anisotropy):
    """The average cosine of hidden states without a given mean: the table ``centred``, as that of
    ``anisotropy``.

    Without a mean of their own, vectors sum to zero whatever they are, which proves nothing; that
    of other texts or images says what is left once the common direction is gone (Godey et al. 2024,
    sec. 2).

    Args:
        means: of every hidden layer, as many numbers as a vector has.
    """

    name, needs = "centred", frozenset({"hidden"})

    def __init__(self, means: Mapping[int, np.ndarray]):
        super().__init__()
        self.means = means

    def vectors(self, activations: Activations) -> Iterator[tuple[str, Vectors]]:
        """The hidden states of a layer, less the mean that is given for it."""
        hidden = activations.spaces["hidden"]
        yield (
            "hidden",
            Vectors(
                hidden.values - hidden.values.new_tensor(self.means[activations.layer]),
                hidden.tokens,
            ),
        )


class WithoutFirst(Metric):
    """A metric of hidden states that passes over the first token of each text.

    Many causal models make it hundreds of times as long as the others, so that it alone can decide
    the mean.
    """

    needs = frozenset({"hidden"})

    def update(self, activations: Activations) -> None:
        hidden = activations.spaces["hidden"]
        tokens = hidden.tokens
        first = tokens.mask & (tokens.mask.cumsum(1) == 1)
        rest = replace(tokens, silent=first if tokens.silent is None else first | tokens.silent)
        super().update(replace(activations, spaces={"hidden": Vectors(hidden.values, rest)}))


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
    units = pd.factorize(pd.Series(corpus.units or range(len(corpus))))[0]
    others, half = (corpus.take(np.flatnonzero(units % 2 == turn)) for turn in (0, 1))
    kinds = [(DimensionMeans(), Anisotropy, Centred)]
    if model.kind == "text":
        kinds.append((MeansWithoutFirst(), AnisotropyWithoutFirst, CentredWithoutFirst))
    found, metrics = measure(model, others, [kind[0] for kind in kinds], **settings), []
    for of_others, as_it_is, centred in kinds:
        means = (
            found[of_others.name]
            .query("token_type == 'all'")
            .groupby("layer")["mean"]
            .apply(np.array)
        )
        metrics += [as_it_is(), centred(means.to_dict())]
    return measure(model, half, metrics, **settings)


def cosines(tables: LazyTables, name: str = "anisotropy") -> pd.Series:
    """The average cosine of the hidden states by layer.

    Args:
        tables: of one model.
        name: of the table: ``anisotropy``, or ``centred`` of :class:`Centred`.
    """
    return tables[name].query("space == 'hidden'").set_index("layer")["cosine"]


def isotropic_excess(tables: LazyTables, name: str = "anisotropy") -> pd.Series:
    """How far the average cosine of each layer rises above what isotropy gives.

    It is the average cosine of the hidden states minus the 95th percentile of the cosine of random
    directions in as many dimensions (Godey et al. 2024, app. B): at most 1 minus the percentile.

    Args:
        tables, name: as for :func:`cosines`.
    """
    return cosines(tables, name) - isotropic(tables.layers.set_index("layer")["width"].dropna())


def isotropic(dimensions: pd.Series) -> pd.Series:
    """The 95th percentile of the cosine of random directions in so many dimensions, computed once
    for each number.
    """
    return dimensions.map({d: isotropic_cosine_quantile(float(d)) for d in dimensions.unique()})


def curves(
    comparison: Comparison,
    table: str = "anisotropy",
    value: str = "cosine",
) -> pd.DataFrame:
    """A number of the hidden states by layer, of models as they are and untrained.

    Args:
        comparison: with untrained twins, or without.
        table, value: where the number is.

    Returns:
        Columns model, weights (``trained`` or ``untrained``), stack, width, layer, the number,
        ci_low and ci_high, and
        isotropic: the 95th percentile of the cosine of random directions in as many dimensions. An
            untrained model is
        the mean of its twins, whose interval counts texts and draws of the weights.
    """
    found = comparison[table]
    found = found.query("space == 'hidden'") if "space" in found else found
    found = found.assign(weights=np.where(found["trained"], "trained", "untrained"))
    places, numbers = ["model", "weights", "stack", "width", "layer"], [value, "ci_low", "ci_high"]
    draws = found[~found["trained"]].groupby(places, sort=False)[numbers]
    twins = [
        (*at, *seed_and_unit_interval(map(Estimate, *rows.T.to_numpy())).row) for at, rows in draws
    ]
    parts = [found.loc[found["trained"], places + numbers]]
    # An empty table has no types, and would take those of the other away.
    parts += [pd.DataFrame(twins, columns=places + numbers)] if twins else []
    both = pd.concat(parts, ignore_index=True)
    return both.assign(isotropic=isotropic(both["width"]))


def drift_correlation(table: pd.DataFrame) -> pd.DataFrame:
    """Whether the average cosine follows the norm of the mean vector over the layers of each model.

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
        norm, cosine = (part[column].to_numpy(float) for column in ("norm_of_mean", "cosine"))
        if not (finite := np.isfinite(norm) & np.isfinite(cosine)).all():
            layer = part["layer"].iloc[finite.argmin()]
            raise AnalysisError(
                f"{model} has no finite drift and cosine in layer {layer}: leave that layer out"
            )
        tests = (
            (stats.spearmanr, stats.pearsonr)
            if len(part) > 2 and np.ptp(norm) and np.ptp(cosine)
            else ()
        )
        found = [number for test in tests for number in test(norm, cosine)] or [math.nan] * 4
        rows.append((model, len(part), *found))
    return pd.DataFrame(
        rows, columns=["model", "layers", "spearman", "spearman_p", "pearson", "pearson_p"]
    )
