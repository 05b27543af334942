"""Anisotropy: the expected cosine of two tokens, of the corpus or of one utterance."""

import numpy as np
import pandas as pd
import scipy
import torch
from jaxtyping import Float
from torch import Tensor

from analysis_lib.capture import Activations
from analysis_lib.capture.vectors import nonzero
from analysis_lib.errors import AnalysisError
from analysis_lib.metrics.accumulator import (
    VECTOR_SPACES,
    WHOLE_SPACES,
    Columns,
    LayerSums,
    Metric,
    means_of,
)


def mean_pair_cosine(
    unit_sum: Float[np.ndarray, "*batch dim"], count: Float[np.ndarray, "*batch"]
) -> Float[np.ndarray, "*batch"]:
    r"""The mean cosine of all pairs of distinct vectors, from the sum of the unit vectors.

    With u_i = x_i / ‖x_i‖ and N vectors, it is (‖Σ u_i‖² − N) / (N (N − 1)): all pairs count,
    though none is formed.

    Args:
        unit_sum: Σ u_i.
        count: N, the number of vectors, at least 2.

    Returns:
        A cosine in [−1/(N − 1), 1]; NaN where N is below 2.

    >>> mean_pair_cosine(np.array([1.0, 1.0]), np.array(2.0))  # two orthogonal vectors
    array(0.)
    """
    return np.asarray(((unit_sum**2).sum(-1) - count) / _pairs(count))


def _pairs(count: np.ndarray | float) -> np.ndarray:
    """Number of ordered pairs of distinct vectors; NaN where there is none."""
    return np.where(count > 1, count * (count - 1), np.nan)


def isotropic_cosine_quantile(dimensions: int | float, probability: float = 0.95) -> float:
    r"""The quantile of the cosine of two independent vectors with uniform directions.

    (1 + cos) / 2 follows a Beta((d − 1)/2, (d − 1)/2) law, so the quantile is exact; for large d it
    is near 1.645/√d at 95 % (Godey et al. 2024, app. B, draw samples instead).

    >>> round(isotropic_cosine_quantile(2, 0.75), 6)  # cos 45°
    0.707107
    """
    if dimensions < 2:
        raise AnalysisError(
            f"{dimensions} dimensions were given: random directions have an angle in 2 or more"
        )
    half = (dimensions - 1) / 2
    return float(2 * scipy.stats.beta.ppf(probability, half, half) - 1)


def refuse_few_vectors(table: pd.DataFrame, name: str, remedy: str) -> None:
    """Raise an AnalysisError if a row of the table has fewer than two vectors to compare."""
    few = table[table["tokens"] < 2]
    if len(few):
        row = few.iloc[0]
        raise AnalysisError(
            f"{name} needs two vectors with a direction, and the {row['space']} space of layer "
            f"{row['layer']} has {row['tokens']}: give more {remedy}, or a model whose vectors "
            "there are not zero"
        )


class Anisotropy(Metric):
    """Expected cosine of two distinct token vectors drawn uniformly from the corpus.

    Source: Godey et al. 2024, sec. 3.

    Exact: every pair counts, within an utterance and across. Columns: space (hidden, final, query,
    key, value), layer, head (missing for the first two), cosine in [−1/(N−1), 1], its 95 %
    interval, and tokens, N. A zero vector has no direction: it is left out, and not counted in
    ``tokens``.
    """

    name = "anisotropy"
    needs = frozenset(VECTOR_SPACES)
    axes = ("head",)
    by_space = True
    interval = "cosine"
    limits = (-1, 1)
    counts = "tokens"

    def update(self, activations: Activations) -> None:
        layer = activations.layer
        for space, vectors in self.vectors(activations):
            self.add(("unit_sum", space, layer), vectors.unit_sum, activations)
            self.add(("vectors", space, layer), vectors.lengths, activations, nonzero)

    def rows(self, sums: LayerSums) -> Columns:
        count = sums["vectors"]
        cosine = mean_pair_cosine(sums["unit_sum"], count)
        return {"cosine": cosine, "tokens": count.astype(int)}

    def table(self) -> pd.DataFrame:
        table = super().table()
        if self.binned_by is None:
            refuse_few_vectors(table, "anisotropy", "text")
        return table


class CosineByDimension(Metric):
    """Contribution of each dimension to the average cosine of hidden vectors.

    With u_i = x_i / ‖x_i‖, S = Σ u_i and Q_j = Σ u_ij², dimension j has c_j = (S_j² − Q_j) / (N (N
    − 1)), and these add up to the average cosine of :class:`Anisotropy`. Columns: space (hidden or
    final), layer, dimension, cosine, c_j, and its 95 % interval. Made on request, for its size: one
    row per layer and dimension.
    """

    name = "cosine_by_dimension"
    needs = frozenset(WHOLE_SPACES)
    axes = ("dimension",)
    by_space = True
    interval = "cosine"
    on_request = True

    def update(self, activations: Activations) -> None:
        layer = activations.layer
        for space, vectors in self.vectors(activations):
            self.add(("unit_sum", space, layer), vectors.unit_sum, activations)
            self.add(("unit_squares", space, layer), vectors.unit_squares, activations)
            self.add(("vectors", space, layer), vectors.nonzero, activations)

    def rows(self, sums: LayerSums) -> Columns:
        pairs = _pairs(sums["vectors"])[..., None]
        cosine = (sums["unit_sum"] ** 2 - sums["unit_squares"]) / pairs
        # Shape: replicate x head x dimension; hidden vectors have one head.
        return {"cosine": cosine[:, 0]}


class UtteranceSimilarity(Metric):
    """Mean cosine of the token pairs of an utterance, averaged over utterances.

    Source: Fosse et al. 2023, eq. 3.

    For an utterance of n tokens it is (‖Σ u_i‖² − n) / (n (n − 1)); utterances of at least two
    tokens count, with equal weight whatever their length. Columns: space, layer, head (missing for
    hidden and final), similarity in [−1, 1], its 95 % interval, and utterances, their number.
    """

    name = "utterance_similarity"
    needs = frozenset(VECTOR_SPACES)
    axes = ("head",)
    by_space = True
    interval = "similarity"
    limits = (-1, 1)
    counts = "utterances"
    of_pairs_within_utterances = True

    def update(self, activations: Activations) -> None:
        layer = activations.layer
        for space, vectors in self.vectors(activations):
            parts = (vectors.unit_sum, *vectors.lengths)
            self.add(("similarity", space, layer), parts, activations, _similarities)
            self.add(("utterances", space, layer), vectors.lengths, activations, _has_pairs)

    def rows(self, sums: LayerSums) -> Columns:
        count = sums["utterances"]
        mean = means_of(sums["similarity"], count)
        return {"similarity": mean, "utterances": count.astype(int)}

    def table(self) -> pd.DataFrame:
        table = super().table()
        if self.binned_by is not None:
            return table
        for row in table[table["utterances"] == 0][:1].itertuples():
            raise AnalysisError(
                "utterance_similarity needs an utterance of two tokens or more with a direction, "
                f"and the {row.space} space of layer {row.layer} has none: give longer text, or a "
                "model whose vectors there are not zero"
            )
        return table


def _similarities(unit_sum: Tensor, norms: Tensor, counted: Tensor) -> Tensor:
    """The mean cosine of the token pairs of each utterance; 0 where it has none."""
    count = nonzero(norms, counted)
    pairs = (count * (count - 1)).clamp_min(1)
    square = unit_sum.double().square().sum(-1)
    return torch.where(count > 1, (square - count) / pairs, 0)


def _has_pairs(norms: Tensor, counted: Tensor) -> Tensor:
    return nonzero(norms, counted) > 1
