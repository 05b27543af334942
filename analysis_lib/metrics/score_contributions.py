"""What each dimension of the keys' input adds to the attention scores."""

from typing import ClassVar

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from analysis_lib.extraction import Activations
from analysis_lib.metrics.accumulator import Metric, Sums
from analysis_lib.models import TOKEN_TYPES


def summed_contributions(
    query_sum: Float[Tensor, "utterance head head_dim"],
    key_projection: Float[Tensor, "head head_dim width"],
    input_sums: Float[Tensor, "utterance type width"],
) -> Float[Tensor, "utterance head type width"]:
    r"""Σ C_j over all query-key pairs of each utterance, by the type of the key.

    For one pair, C = (q_m W_K) ∘ x_n with q_m the query after bias (Maruta and Matsuzaki 2024, eq. 7). The sum over
    pairs factors: Σ_m Σ_n C = ((Σ_m q_m) W_K) ∘ Σ_n x_n, so no pair is formed. Over dimensions, the C_j of a
    pair add up to its score less q_m · b_K, which is the same for every key.

    Args:
        query_sum: Σ_m q_m of each utterance and head.
        key_projection: W_K of each head: k = W_K x + b_K.
        input_sums: Σ_n x_n over the keys of each type.

    Returns:
        The sums, before the 1/√d' scaling of the scores.
    """
    gradient = torch.einsum("bhe,hed->bhd", query_sum, key_projection)
    return gradient.unsqueeze(2) * input_sums.unsqueeze(1)


class ScoreContributions(Metric):
    """Mean contribution C_j of each dimension of the attention input to the scores (Maruta and Matsuzaki 2024, eq. 7).

    Columns: layer, head, dimension (from 0), key_type (all, cls, sep, punct, other), contribution, the mean of C_j
    over query-key pairs, before the 1/√d' scaling; and pairs, how many. A type that does not occur has no row.
    """

    name: ClassVar[str] = "score_contributions"
    needs: ClassVar[frozenset[str]] = frozenset({"attention_input", "query"})

    def update(self, activations: Activations) -> None:
        if "query" not in activations.spaces:
            return
        batch, layer = activations.batch, activations.layer
        contributions = summed_contributions(
            activations.spaces["query"].sum,
            activations.key_projection,
            activations.spaces["attention_input"].type_sums.squeeze(1),
        )
        self._add(("sum", layer), contributions, activations)
        self._add(("pairs", layer), batch.counts.unsqueeze(1) * batch.type_masks.sum(-1), activations)

    def points(self, sums: Sums) -> pd.DataFrame:
        frames = []
        for quantity, layer in sums:
            if quantity == "sum":
                by_type, pairs = sums["sum", layer], sums["pairs", layer]
                totals = np.concatenate([by_type.sum(1, keepdims=True), by_type], axis=1)
                counts = np.array([pairs.sum(), *pairs])
                occurs = counts > 0
                means = totals[:, occurs] / counts[occurs, None]
                heads, types, width = means.shape
                columns = {
                    "head": pd.array(np.repeat(np.arange(1, heads + 1), types * width), dtype="Int64"),
                    "dimension": np.tile(np.arange(width), heads * types),
                    "key_type": pd.Categorical.from_codes(
                        np.tile(np.repeat(np.flatnonzero(occurs), width), heads), ["all", *TOKEN_TYPES]
                    ),
                    "contribution": means.ravel(),
                    "pairs": np.tile(np.repeat(counts[occurs].astype(int), width), heads),
                }
                frames.append(pd.DataFrame({"layer": layer, **columns}))
        return pd.concat(frames, ignore_index=True)
