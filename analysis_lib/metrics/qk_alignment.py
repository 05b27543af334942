"""Alignment of queries and keys."""

import numpy as np
import pandas as pd

from analysis_lib.capture import Activations
from analysis_lib.metrics.accumulator import Metric, Sums, head_rows, tabulated


class QueryKeyAlignment(Metric):
    """Cosine and scalar product of the mean query and the mean key of a head, after bias (Godey et al. 2024, sec. 5).

    Columns: layer, head, cosine in [−1, 1] (NaN where a mean is exactly zero) and dot, before the 1/√d' scaling.
    """

    name = "qk_alignment"
    needs = frozenset({"query", "key"})

    def update(self, activations: Activations) -> None:
        if "query" not in activations.spaces:
            return
        for space in ("query", "key"):
            vectors = activations.spaces[space]
            self.add((space, activations.layer), vectors.sum, activations)
            self.add((f"{space} tokens", activations.layer), vectors.counts, activations)

    def points(self, sums: Sums) -> pd.DataFrame:
        def rows(layer: int) -> pd.DataFrame:
            query, key = (sums[name, layer] / sums[f"{name} tokens", layer] for name in ("query", "key"))
            # Grouped queries share the keys of their group.
            key = np.repeat(key, len(query) // len(key), axis=0)
            dot = (query * key).sum(-1)
            norms = np.linalg.norm(query, axis=-1) * np.linalg.norm(key, axis=-1)
            return head_rows(layer, {"cosine": dot / np.where(norms > 0, norms, np.nan), "dot": dot})

        return tabulated(sums, "query", rows)
