"""The spectrum of a layer's vectors: how many directions they use, and how fast variance decays."""

import numpy as np
from jaxtyping import Float

from analysis_lib.capture import Activations
from analysis_lib.metrics.accumulator import Columns, LayerSums, means_of
from analysis_lib.metrics.moments import SecondMoments, covariance

# The ranks, from 1, of the eigenvalues to which the power law is fitted: as in the code of the
# authors of Li et al. 2025, since the first eigenvalues follow none.
FIRST_RANK, LAST_RANK = 11, 100
# Number of the largest eigenvalues in the second share.
SEVERAL = 10


def effective_rank(
    sizes: Float[np.ndarray, "*batch dim"],
) -> Float[np.ndarray, "*batch"]:
    r"""exp(−Σ p ln p) of the shares p = s / Σ s of sizes that are not negative.

    Of the singular values of the vectors it is RankMe (Garrido et al. 2023), without the 1e-7 that
    they add to each p; of the eigenvalues of the covariance, the RankMe of Li et al. 2025.

    Returns:
        A value from 1, where one size has everything, to d, where all are the same; NaN where all
        are zero.

    >>> round(float(effective_rank(np.array([2.0, 2.0, 0.0]))), 6)
    2.0
    """
    total = sizes.sum(-1, keepdims=True)
    shares = means_of(sizes, total)
    logarithms = np.log(np.where(shares > 0, shares, 1))
    entropy = -(shares * logarithms).sum(-1)
    return np.asarray(np.exp(entropy))


def decay(
    eigenvalues: Float[np.ndarray, " dim"],
) -> float:
    r"""The exponent α of λ_k ∝ k^−α, fitted to the eigenvalues of ranks 11 to 100.

    Source: α-ReQ (Agrawal et al. 2022).

    The fit is of ln λ_k on ln k by least squares with the weights 1/k of Stringer et al. 2019, so
    that each factor of ranks counts alike; it ends where the eigenvalues are zero.

    Args:
        eigenvalues: the largest first.

    Returns:
        The exponent: 0 where all are the same; NaN where fewer than two of these are positive.

    >>> ranks = np.arange(1, 201)
    >>> round(float(decay(ranks**-1.5)), 6)
    1.5
    """
    ranks = np.arange(FIRST_RANK, min(LAST_RANK, len(eigenvalues)) + 1)
    ranks = ranks[eigenvalues[ranks - 1] > 0]
    if len(ranks) < 2:
        return np.nan
    slope, _ = np.polyfit(np.log(ranks), np.log(eigenvalues[ranks - 1]), 1, w=ranks**-0.5)
    return -slope


class Spectrum(SecondMoments):
    r"""Eigenvalues of the vectors of a layer: effective ranks, decay and largest shares.

    Columns: space, layer, head (missing for hidden and final), then

    - rankme, exp(−Σ p ln p) of the shares p of the singular values σ of the matrix of all vectors,
      whose mean is not subtracted (Garrido et al. 2023); σ² are eigenvalues of Σ x xᵀ;
    - effective_rank, the same of the eigenvalues λ of the covariance, which is the RankMe of Li et
      al. 2025: both lie between 1 and the smaller of the numbers of dimensions and of vectors;
    - alpha, of λ_k ∝ k^−α, see :func:`decay` (α-ReQ, Agrawal et al. 2022), large where it decays
      fast;
    - top_1 and top_10, the shares of the largest and the ten largest λ in the variance, in [0, 1];
    - tokens, the number of vectors, zero vectors included.

    Where the vectors are all the same, the columns of the covariance are missing. Numbers depend on
    how many vectors there are, until there are many more than dimensions: compare equal numbers.
    Squares lose the singular values below 1e-7 of the largest, which count as zero. The second
    moments are kept once, so there is no interval: measure parts of the corpus for one.

    Args:
        spaces: the spaces to measure, from hidden, final, query, key, value, query_unrotated and
            key_unrotated.
        vectors_of: ``last`` for one vector per text, as Li et al. 2025 take it, see
            :class:`~analysis_lib.metrics.accumulator.Metric`.
    """

    name = "spectrum"

    def update(self, activations: Activations) -> None:
        for space, vectors in self.vectors(activations):
            self.add_moments(space, vectors, activations)

    def rows(self, sums: LayerSums) -> Columns:
        moment = sums.whole["moment"]
        around_zero = _largest_first(moment)
        rounding = moment.shape[-1] * np.finfo(float).eps * around_zero[..., :1]
        around_zero[around_zero <= rounding] = 0
        tokens = sums.whole["tokens"]
        around_mean = _largest_first(covariance(sums.whole)) * tokens[..., None]
        around_mean[around_mean <= rounding] = 0
        total = around_mean.sum(-1)
        return {
            "rankme": effective_rank(np.sqrt(around_zero)),
            "effective_rank": effective_rank(around_mean),
            "alpha": np.array([decay(eigenvalues) for eigenvalues in around_mean]),
            "top_1": means_of(around_mean[..., 0], total),
            "top_10": means_of(around_mean[..., :SEVERAL].sum(-1), total),
            "tokens": tokens.astype(int),
        }


def _largest_first(
    matrix: Float[np.ndarray, "*batch dim dim"],
) -> Float[np.ndarray, "*batch dim"]:
    """The eigenvalues of a symmetric matrix."""
    return np.linalg.eigvalsh(matrix)[..., ::-1].copy()
