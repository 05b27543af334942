"""Mean of every dimension of the hidden state, and the dimensions whose mean is an outlier."""

import numpy as np
from jaxtyping import Float

from analysis_lib.capture import Activations
from analysis_lib.metrics.accumulator import (
    Columns,
    LayerSums,
    Metric,
    kinds_of,
    type_means,
)

THRESHOLD = 3.0


def magnitude_zscores(means: Float[np.ndarray, " dim"]) -> Float[np.ndarray, " dim"]:
    """z-score of each |mean| among the dimensions of a layer.

    It is the distance of |mean| from the layer's average |mean|, in standard deviations (of the
    population).

    Returns:
        z-scores, which average 0; all 0 where every |mean| is the same.

    >>> magnitude_zscores(np.array([1.0, -1.0, 1.0, 5.0])).round(3).tolist()
    [-0.577, -0.577, -0.577, 1.732]
    """
    magnitudes = np.abs(means)
    spread = magnitudes.std()
    if spread == 0:
        return np.zeros_like(magnitudes)
    return (magnitudes - magnitudes.mean()) / spread


class DimensionMeans(Metric):
    """Mean of each dimension of the hidden state, over all tokens and per token type.

    Columns: layer, dimension (from 0), token_type (all, cls, sep, first, punct, other) and mean, in
    the units of the hidden state (Maruta and Matsuzaki 2024, sec. 2.1 and 3). A type that does not
    occur has no row.
    """

    name = "dimension_means"
    needs = frozenset({"hidden"})
    axes = ("token_type", "dimension")
    order = ("layer", "dimension", "token_type")

    def update(self, activations: Activations) -> None:
        layer = activations.layer
        for _, hidden in self.vectors(activations):
            tokens = hidden.tokens
            counts = tokens.type_counts[:, tokens.counted_types]
            self.add(("sum", layer), hidden.counted_type_sums.squeeze(1), activations)
            self.add(("tokens", layer), counts, activations)

    def rows(self, sums: LayerSums) -> Columns:
        tokens = sums["tokens"]
        occur = sums.whole["tokens"] > 0
        means, _ = type_means(sums["sum"][:, occur], tokens, occur)
        types = kinds_of(occur, self.types[-len(occur) :])
        return {"token_type": types, "mean": means}


class OutlierDimensions(DimensionMeans):
    """Dimensions whose |mean| lies more than 3 standard deviations above the layer's average.

    Columns: layer, dimension (from 0), mean, and zscore, above 3; the largest z-score of a layer
    comes first. A layer without an outlier has no row. The means run over all tokens (Maruta and
    Matsuzaki 2024, sec. 2.1).
    """

    name = "outlier_dimensions"
    axes = ("dimension",)
    order = ("layer", "dimension")

    def rows(self, sums: LayerSums) -> Columns:
        mean = sums["sum"][0].sum(0) / sums["tokens"].sum()
        zscore = magnitude_zscores(mean)
        order = np.argsort(-zscore, kind="stable")
        outliers = order[zscore[order] > THRESHOLD]
        return {"dimension": outliers, "mean": mean[outliers], "zscore": zscore[outliers]}
