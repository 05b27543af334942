"""Dimensions whose mean lies far from the others."""

import numpy as np
import pandas as pd
from jaxtyping import Float

from analysis_lib.metrics.accumulator import Sums, tabulated
from analysis_lib.metrics.dimension_means import DimensionMeans

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


class OutlierDimensions(DimensionMeans):
    """Dimensions whose |mean| lies more than 3 standard deviations above the layer's average |mean|.

    Columns: layer, dimension (from 0), mean, and zscore, above 3; the largest z-score of a layer comes first. A
    layer without an outlier has no row. The means run over all tokens (Maruta and Matsuzaki 2024, sec. 2.1).
    """

    name = "outlier_dimensions"

    def points(self, sums: Sums) -> pd.DataFrame:
        def rows(layer: int) -> pd.DataFrame:
            mean = sums["sum", layer].sum(0) / sums["tokens", layer].sum()
            zscore = magnitude_zscores(mean)
            order = np.argsort(-zscore, kind="stable")
            found = order[zscore[order] > THRESHOLD]
            columns = {"dimension": found, "mean": mean[found], "zscore": zscore[found]}
            return pd.DataFrame({"layer": np.full(len(found), layer), **columns})

        return tabulated(sums, "sum", rows)
