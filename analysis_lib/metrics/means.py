"""Mean vectors of spaces: their norm, called drift, those of each head, and query-key alignment."""

from typing import ClassVar

import numpy as np

from analysis_lib.capture import UNROTATED, Activations
from analysis_lib.capture.vectors import norm_sum
from analysis_lib.metrics.accumulator import VECTOR_SPACES, Columns, LayerSums, Metric, means_of


class MeanVector(Metric):
    """Norm of the mean vector, ‖x̄‖₂, called drift, and the mean norm.

    Source: Godey et al. 2024, sec. 3.3.

    Columns: space, layer, head (missing for hidden and final), norm_of_mean and mean_norm, both in
    the units of the vectors; 0 ≤ norm_of_mean ≤ mean_norm. Zero vectors count.
    """

    name = "mean_vector"
    needs = frozenset(VECTOR_SPACES)
    axes = ("head",)
    by_space = True

    def update(self, activations: Activations) -> None:
        layer = activations.layer
        for space, vectors in self.vectors(activations):
            self.add(("sum", space, layer), vectors.sum, activations)
            self.add(("norms", space, layer), vectors.lengths, activations, norm_sum)
            self.add(("tokens", space, layer), vectors.counts, activations)

    def rows(self, sums: LayerSums) -> Columns:
        tokens = sums["tokens"][:, None]
        mean = sums["sum"] / tokens[..., None]
        norm_of_mean = np.linalg.norm(mean, axis=-1)
        return {"norm_of_mean": norm_of_mean, "mean_norm": sums["norms"] / tokens}


class HeadMeans(Metric):
    """Mean query, key and value vector of each head, after bias.

    Source: Godey et al. 2024, sec. 5: Q̄ and K̄.

    Columns: space (query, key, value, query_unrotated or key_unrotated), layer, head, dimension (of
    the head, from 0) and mean, in the units of the vectors.
    """

    name = "head_means"
    needs = frozenset({"query", "key", "value", *UNROTATED})
    axes = ("head", "dimension")
    by_space = True

    def update(self, activations: Activations) -> None:
        layer = activations.layer
        for space, vectors in self.vectors(activations):
            self.add(("sum", space, layer), vectors.sum, activations)
            self.add(("tokens", space, layer), vectors.counts, activations)

    def rows(self, sums: LayerSums) -> Columns:
        tokens = sums["tokens"][:, None, None]
        return {"mean": sums["sum"] / tokens}


class QueryKeyAlignment(Metric):
    """Cosine and scalar product of the mean query and the mean key of a head, after bias.

    Source: Godey et al. 2024, sec. 5.

    Columns: layer, head, cosine in [−1, 1] (NaN where a mean is exactly zero), its 95 % interval,
    and dot, before the 1/√d' scaling.
    """

    name = "qk_alignment"
    needs = frozenset({"query", "key"})
    axes = ("head",)
    interval = "cosine"
    limits = (-1, 1)
    spaces: ClassVar[tuple[str, str]] = ("query", "key")

    def update(self, activations: Activations) -> None:
        if not self.needs <= activations.spaces.keys():
            return
        layer = activations.layer
        names = dict(zip(self.spaces, ("query", "key"), strict=True))
        for space, vectors in self.vectors(activations):
            name = names[space]
            self.add((name, layer), vectors.sum, activations)
            self.add((f"{name} tokens", layer), vectors.counts, activations)

    def rows(self, sums: LayerSums) -> Columns:
        query = sums["query"] / sums["query tokens"][:, None, None]
        key = sums["key"] / sums["key tokens"][:, None, None]
        # With grouped queries, the queries of a group share its keys.
        shared_by = query.shape[1] // key.shape[1]
        key = np.repeat(key, shared_by, axis=1)
        dot = (query * key).sum(-1)
        query_norm = np.linalg.norm(query, axis=-1)
        key_norm = np.linalg.norm(key, axis=-1)
        return {"cosine": means_of(dot, query_norm * key_norm), "dot": dot}


class UnrotatedAlignment(QueryKeyAlignment):
    """Cosine and scalar product of the mean query and the mean key before rotation by position.

    Rotary models rotate queries and keys by their positions, and the means of ``qk_alignment`` are
    taken after that: they lose what turns fast. The columns are those of ``qk_alignment``. Layers
    without a rotation have no row. Made on request.
    """

    name = "qk_alignment_unrotated"
    needs = frozenset(UNROTATED)
    on_request = True
    reason_for_none = "no layer rotates queries and keys: leave it out"
    spaces = UNROTATED
