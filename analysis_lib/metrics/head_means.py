"""The mean query, key and value of each head."""

import pandas as pd

from analysis_lib.capture import Activations
from analysis_lib.metrics.accumulator import Metric, Sums, tabulated


class HeadMeans(Metric):
    """The mean query, key and value vector of each head, after bias (Godey et al. 2024, sec. 5: Q̄ and K̄).

    Columns: space (query, key or value), layer, head, dimension (of the head, from 0) and mean, in the units of the
    vectors.
    """

    name = "head_means"
    needs = frozenset({"query", "key", "value"})

    def update(self, activations: Activations) -> None:
        for space, vectors in self.vectors(activations):
            self.add(("sum", space, activations.layer), vectors.sum, activations)
            self.add(("tokens", space, activations.layer), vectors.counts, activations)

    def points(self, sums: Sums) -> pd.DataFrame:
        def rows(space: str, layer: int) -> pd.DataFrame:
            means = pd.DataFrame(sums["sum", space, layer] / sums["tokens", space, layer])
            means.index += 1
            rows = means.rename_axis("head").stack().rename_axis(["head", "dimension"]).rename("mean").reset_index()
            return rows.assign(space=space, layer=layer)[["space", "layer", "head", "dimension", "mean"]]

        return tabulated(sums, "sum", rows).astype({"head": "Int64"})
