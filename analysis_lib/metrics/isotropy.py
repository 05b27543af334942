"""Isotropy: the distance of a cloud of vectors from one without a preferred direction."""

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float

from analysis_lib.capture import Activations
from analysis_lib.capture.vectors import Vectors
from analysis_lib.metrics.accumulator import Columns, LayerSums, means_of
from analysis_lib.metrics.anisotropy import mean_pair_cosine, refuse_few_vectors
from analysis_lib.metrics.moments import SecondMoments, covariance


def mean_square_cosine(
    unit_moment: Float[np.ndarray, "*batch dim dim"],
    vectors: Float[np.ndarray, "*batch"],
) -> Float[np.ndarray, "*batch"]:
    r"""Mean squared cosine of all pairs of distinct vectors, from the moment of unit vectors.

    With u_i = x_i / ‖x_i‖ and M = Σ u_i u_iᵀ, Σ_i Σ_j (u_i·u_j)² = ‖M‖_F², and N of these terms are
    pairs of a vector with itself: the mean is (‖M‖_F² − N) / (N (N − 1)). In an isotropic cloud it
    is 1/d; norms do not matter.

    Args:
        unit_moment: M, a sum and not a mean.
        vectors: N, at least 2.

    Returns:
        A value in [0, 1]; NaN where N is below 2.

    >>> # A vector across three parallel ones: 3 pairs of 6.
    >>> mean_square_cosine(np.diag([1.0, 3.0]), np.array(4.0))
    array(0.5)
    """
    square = np.square(unit_moment).sum((-2, -1))
    # Rounding can put orthogonal vectors slightly below zero.
    of_pairs = np.maximum(square - vectors, 0)
    pairs = np.where(vectors > 1, vectors * (vectors - 1), np.nan)
    return np.asarray(of_pairs / pairs)


def isoscore(
    covariance: Float[np.ndarray, "*batch dim dim"],
) -> Float[np.ndarray, "*batch"]:
    r"""IsoScore (Rudman et al. 2022): share of its dimensions that a cloud uses, after the first.

    It is (P − 1) / (d − 1), where P = (tr C)² / ‖C‖_F² = (Σ λ)² / Σ λ² is the participation ratio
    of the eigenvalues λ of the covariance C. The paper's algorithm rescales the variances along the
    principal components to λ̂ = √d λ / ‖λ‖, takes the isotropy defect δ = ‖λ̂ − 1‖ / √(2 (d − √d)),
    then φ = (d − δ² (d − √d))² / d², and returns (d φ − 1) / (d − 1). Since ‖λ̂‖² = d and Σ λ̂ = √d
    √P, the square ‖λ̂ − 1‖² is 2 (d − √d √P), so that δ² (d − √d) = d − √(d P) and φ = d P / d² = P
    / d. No principal components have to be computed, and the scale of C does not matter.

    Args:
        covariance: C, with any normalisation.

    Returns:
        A value in [0, 1]: 1 where the variance is the same in every direction, 0 where it lies
        along one line; NaN where there is no variance, or a single dimension.

    >>> isoscore(np.diag([1.0, 1.0, 0.0]))  # two of three dimensions
    array(0.5)
    """
    dimensions = covariance.shape[-1]
    trace = np.trace(covariance, axis1=-2, axis2=-1)
    square = np.square(covariance).sum((-2, -1))
    participation = means_of(trace**2, square)
    further = dimensions - 1 or np.nan
    return np.asarray((participation - 1) / further)


class Isotropy(SecondMoments):
    r"""Deviation of a layer's vectors from an isotropic cloud of as many dimensions.

    Godey et al. 2024, app. B, leave "isotropy metrics that are grounded to isotropic
    cosine-similarity distributions" to future work. In an isotropic cloud in d dimensions the
    cosine of a pair has mean 0 and variance 1/d, which gives two measures, alongside the IsoScore
    of Rudman et al. 2022. Columns: space, layer, head (missing for hidden and final), then

    - dimensions, d;
    - deviations, √d times the mean cosine: how many standard deviations of an isotropic pair's
      cosine lie between it and 0, with its 95 % interval; from −√d/(N − 1) to √d, and near 0 in an
      isotropic cloud;
    - mean_square_cosine, in [0, 1], of distinct pairs; near 1/d in an isotropic cloud;
    - effective_dimension, its inverse: the number of dimensions in which isotropic directions have
      that mean square; 1 where all vectors lie on one line, near d in an isotropic cloud, and
      infinite where all are orthogonal;
    - isoscore, in [0, 1], of the covariance; missing where the vectors are all the same;
    - tokens, the number of vectors that are not zero.

    Cosines depend neither on the length of a vector nor on the mean of the cloud; IsoScore
    subtracts the mean and weights by squared length. A round cloud far from the origin therefore
    has many deviations and an effective dimension near 1, and an IsoScore near 1; a centred cloud
    with a few long dimensions has no deviations.

    The second moments take 16 d² bytes per layer and head, so they are kept once, and not per
    jackknife group: only ``deviations``, which does not use them, has an interval.

    Args:
        spaces: the spaces to measure, from hidden, final, query, key, value, query_unrotated and
            key_unrotated.
        vectors_of, bins: see :class:`~analysis_lib.metrics.accumulator.Metric`.
    """

    name = "isotropy"
    interval = "deviations"

    def update(self, activations: Activations) -> None:
        for space, vectors in self.vectors(activations):
            self._update(space, vectors, activations)

    def _update(self, space: str, vectors: Vectors, activations: Activations) -> None:
        layer = activations.layer
        self.add(("unit_sum", space, layer), vectors.unit_sum, activations)
        self.add(("vectors", space, layer), vectors.nonzero, activations)
        values = self.add_moments(space, vectors, activations)
        lengths = torch.linalg.vector_norm(values, dim=-1, keepdim=True)
        units = values / torch.where(lengths != 0, lengths, 1)
        self.add_whole(("unit_moment", space, layer), units.mT @ units)

    def rows(self, sums: LayerSums) -> Columns:
        vectors = sums.whole["vectors"]
        dimensions = sums["unit_sum"].shape[-1]
        square = mean_square_cosine(sums.whole["unit_moment"], vectors)
        with np.errstate(divide="ignore"):
            effective = 1 / square
        return {
            "dimensions": np.array(dimensions),
            "deviations": _deviations(sums["unit_sum"], sums["vectors"]),
            "mean_square_cosine": square,
            "effective_dimension": effective,
            "isoscore": isoscore(covariance(sums.whole)),
            "tokens": vectors.astype(int),
        }

    def table(self) -> pd.DataFrame:
        table = super().table()
        if self.binned_by is None:
            refuse_few_vectors(table, "isotropy", "data")
        return table


def _deviations(
    unit_sum: Float[np.ndarray, "*batch dim"],
    vectors: Float[np.ndarray, "*batch"],
) -> Float[np.ndarray, "*batch"]:
    dimensions = unit_sum.shape[-1]
    return mean_pair_cosine(unit_sum, vectors) * np.sqrt(dimensions)
