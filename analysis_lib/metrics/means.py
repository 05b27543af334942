"""The mean vector of a space: its norm, which is the drift, the means of each head, and the alignment of two."""

import numpy as np

from analysis_lib.capture import Activations
from analysis_lib.metrics.accumulator import (
    VECTOR_SPACES,
    Columns,
    Layers,
    Metric,
    Points,
    Sums,
    crossed,
    head_rows,
    tabulated,
)


class MeanVector(Metric):
    """The norm of the mean vector, ‖x̄‖₂, called drift, and the mean norm (Godey et al. 2024, sec. 3.3).

    Columns: space, layer, head (missing for hidden and final), norm_of_mean and mean_norm, both in the units of the
    vectors; 0 ≤ norm_of_mean ≤ mean_norm. Zero vectors count.
    """

    name = "mean_vector"
    needs = frozenset(VECTOR_SPACES)

    def update(self, activations: Activations) -> None:
        for space, vectors in self.vectors(activations):
            self.add(("sum", space, activations.layer), vectors.sum, activations)
            self.add(("norms", space, activations.layer), vectors.norms.sum(-1), activations)
            self.add(("tokens", space, activations.layer), vectors.counts, activations)

    def points(self, sums: Sums) -> Points:
        def rows(layers: Layers, space: str) -> Columns:
            tokens = layers["tokens", space][:, None]
            norm_of_mean = np.linalg.norm(layers["sum", space] / tokens[..., None], axis=-1)
            mean_norm = layers["norms", space] / tokens
            return head_rows(layers, {"norm_of_mean": norm_of_mean, "mean_norm": mean_norm}, space)

        return tabulated(sums, "sum", rows)


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

    def points(self, sums: Sums) -> Points:
        def rows(layers: Layers, space: str) -> Columns:
            means = layers["sum", space] / layers["tokens", space][:, None, None]
            _, heads, width = means.shape
            axes = {"space": [space], "head": range(1, heads + 1), "dimension": range(width)}
            return crossed(layers, axes, mean=means[:, None])

        return tabulated(sums, "sum", rows)[["space", "layer", "head", "dimension", "mean"]]


class QueryKeyAlignment(Metric):
    """Cosine and scalar product of the mean query and the mean key of a head, after bias (Godey et al. 2024, sec. 5).

    Columns: layer, head, cosine in [−1, 1] (NaN where a mean is exactly zero), its 95 % interval, and dot, before the
    1/√d' scaling.
    """

    name = "qk_alignment"
    needs = frozenset({"query", "key"})
    interval = "cosine"
    limits = (-1, 1)

    def update(self, activations: Activations) -> None:
        if not self.needs <= activations.spaces.keys():
            return
        for space in ("query", "key"):
            vectors = activations.spaces[space]
            self.add((space, activations.layer), vectors.sum, activations)
            self.add((f"{space} tokens", activations.layer), vectors.counts, activations)

    def points(self, sums: Sums) -> Points:
        def rows(layers: Layers) -> Columns:
            query, key = (layers[name] / layers[f"{name} tokens"][:, None, None] for name in ("query", "key"))
            # Grouped queries share the keys of their group.
            key = np.repeat(key, query.shape[1] // key.shape[1], axis=1)
            dot = (query * key).sum(-1)
            norms = np.linalg.norm(query, axis=-1) * np.linalg.norm(key, axis=-1)
            return head_rows(layers, {"cosine": dot / np.where(norms > 0, norms, np.nan), "dot": dot})

        return tabulated(sums, "query", rows)
