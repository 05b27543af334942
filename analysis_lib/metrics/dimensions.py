"""Mean value of every dimension of the hidden state, and the dimensions whose mean lies far from the others."""

import numpy as np
from jaxtyping import Float

from analysis_lib.capture import Activations
from analysis_lib.metrics.accumulator import Columns, Layers, Metric, Points, Sums, crossed, tabulated, type_means
from analysis_lib.models import TOKEN_TYPES

THRESHOLD = 3.0


def magnitude_zscores(means: Float[np.ndarray, " dim"]) -> Float[np.ndarray, " dim"]:
    """How far each |mean| lies above the average |mean| of the layer, in standard deviations (of the population).

    Returns:
        z-scores, which average 0; all 0 where every |mean| is the same.

    >>> magnitude_zscores(np.array([1.0, -1.0, 1.0, 5.0])).round(3).tolist()
    [-0.577, -0.577, -0.577, 1.732]
    """
    magnitudes = np.abs(means)
    spread = magnitudes.std()
    return (magnitudes - magnitudes.mean()) / spread if spread > 0 else np.zeros_like(magnitudes)


class DimensionMeans(Metric):
    """Mean of each dimension of the hidden state, over all tokens and per token type.

    Columns: layer, dimension (from 0), token_type (all, cls, sep, first, punct, other) and mean, in the units of the
    hidden state (Maruta and Matsuzaki 2024, sec. 2.1 and 3). A type that does not occur has no row.
    """

    name = "dimension_means"
    needs = frozenset({"hidden"})
    kinds = "tokens"

    def update(self, activations: Activations) -> None:
        if (hidden := activations.spaces.get("hidden")) is not None:
            tokens, layer = hidden.tokens, activations.layer
            counts = (tokens.type_masks * tokens.counted.unsqueeze(1)).sum(-1)
            self.add(("sum", layer), hidden.counted_type_sums.squeeze(1), activations)
            self.add(("tokens", layer), counts[:, tokens.counted_types], activations)

    def points(self, sums: Sums) -> Points:
        def rows(layers: Layers) -> Columns:
            tokens, occur = layers["tokens"], layers.occur
            means, _, types = type_means(layers["sum"][:, occur], tokens, occur, TOKEN_TYPES[-len(occur) :])
            return crossed(layers, {"token_type": types, "dimension": range(means.shape[-1])}, mean=means)

        return tabulated(sums, "sum", rows)[["layer", "dimension", "token_type", "mean"]]


class OutlierDimensions(DimensionMeans):
    """Dimensions whose |mean| lies more than 3 standard deviations above the layer's average |mean|.

    Columns: layer, dimension (from 0), mean, and zscore, above 3; the largest z-score of a layer comes first. A
    layer without an outlier has no row. The means run over all tokens (Maruta and Matsuzaki 2024, sec. 2.1).
    """

    name = "outlier_dimensions"

    def points(self, sums: Sums) -> Points:
        def rows(layer: Layers) -> Columns:
            mean = layer["sum"][0].sum(0) / layer["tokens"].sum()
            zscore = magnitude_zscores(mean)
            order = np.argsort(-zscore, kind="stable")
            found = order[zscore[order] > THRESHOLD]
            columns = {"dimension": found, "mean": mean[found], "zscore": zscore[found]}
            return {"layer": np.repeat(layer.numbers, len(found)), **columns}

        return tabulated(sums.apart(), "sum", rows)
