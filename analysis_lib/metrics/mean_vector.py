"""The mean vector of a space: drift."""

import numpy as np
import pandas as pd

from analysis_lib.capture import Activations
from analysis_lib.metrics.accumulator import VECTOR_SPACES, Metric, Sums, head_rows, tabulated


class MeanVector(Metric):
    """The norm of the mean vector, ‖x̄‖₂, called drift, and the mean norm (Godey et al. 2024, sec. 3.3).

    Columns: space, layer, head (missing for hidden), norm_of_mean and mean_norm, both in the units of the
    vectors; 0 ≤ norm_of_mean ≤ mean_norm. Zero vectors count.
    """

    name = "mean_vector"
    needs = frozenset(VECTOR_SPACES)

    def update(self, activations: Activations) -> None:
        for space, vectors in self.vectors(activations):
            self.add(("sum", space, activations.layer), vectors.sum, activations)
            self.add(("norms", space, activations.layer), vectors.norms.sum(-1), activations)
            self.add(("tokens", space, activations.layer), vectors.counts, activations)

    def points(self, sums: Sums) -> pd.DataFrame:
        def rows(space: str, layer: int) -> pd.DataFrame:
            tokens = sums["tokens", space, layer]
            norm_of_mean = np.linalg.norm(sums["sum", space, layer] / tokens, axis=-1)
            mean_norm = sums["norms", space, layer] / tokens
            return head_rows(layer, {"norm_of_mean": norm_of_mean, "mean_norm": mean_norm}, space)

        return tabulated(sums, "sum", rows)
