"""What each dimension of the keys' input adds to the attention scores."""

from typing import ClassVar

import numpy as np
import pandas as pd

from analysis_lib.capture import SCORES, Activations
from analysis_lib.metrics.accumulator import Metric, Sums
from analysis_lib.models.loading import TOKEN_TYPES


class ScoreContributions(Metric):
    """Mean contribution C_j of each dimension of the attention input to the scores (Maruta and Matsuzaki 2024, eq. 7).

    For one pair, C = (q_m W_K) ∘ x_n with q_m the query after bias. The sum over pairs factors, Σ_m Σ_n C =
    ((Σ_m q_m) W_K) ∘ Σ_n x_n, so no pair is formed; over dimensions, the C_j of a pair add up to its score less what
    does not depend on the key's input (``score_terms``). In causal models Σ_m runs over the queries that see key n, a
    sum from the end. In rotary models the score after rotation is q_m R_mᵀ R_n W_K x_n: since R_n does not depend on
    the query, it goes around the sum of the rotated queries. A normalised key is divided by its norm as it is.
    DeBERTa's position-to-content scores are part of C, as they depend on the key's input.

    Columns: layer, head, dimension (from 0), key_type (all, cls, sep, punct, other), contribution, the mean of C_j
    over the pairs of a query and a key that it may see, before scaling; and pairs, how many. A type that does not
    occur has no row.
    """

    name: ClassVar[str] = "score_contributions"
    needs: ClassVar[frozenset[str]] = frozenset({SCORES})

    def update(self, activations: Activations) -> None:
        if activations.scores is None:
            return
        self.add(("sum", activations.layer), activations.scores.contributions, activations)
        self.add(("pairs", activations.layer), activations.scores.visibility.pairs, activations)

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


class ScoreTerms(Metric):
    """What the scores of a head are made of, besides their dimensions.

    Columns: layer, head, key_type (all, cls, sep, punct, other), term, contribution, the mean over the pairs of a
    query and a key that it may see, before scaling; and pairs, how many. The terms are ``content``, q · W_K x_n
    (Σ_j C_j but for the next); ``position_query``, the position-to-content scores of DeBERTa; ``key_bias``, q · b_K;
    and ``position``, what is added whatever the key's input: relative position biases (T5, MPNet, BEiT), and
    DeBERTa's content-to-position scores. They add up to the mean score. A term that the architecture lacks has no row.
    """

    name: ClassVar[str] = "score_terms"
    needs: ClassVar[frozenset[str]] = frozenset({SCORES})

    def update(self, activations: Activations) -> None:
        if activations.scores is None:
            return
        for term, sums in activations.scores.terms.items():
            self.add((term, activations.layer), sums, activations)
        self.add(("pairs", activations.layer), activations.scores.visibility.pairs, activations)

    def points(self, sums: Sums) -> pd.DataFrame:
        frames = []
        for term, layer in sums:
            if term != "pairs":
                pairs = sums["pairs", layer]
                totals = np.column_stack([sums[term, layer].sum(1), sums[term, layer]])
                counts = np.array([pairs.sum(), *pairs])
                occurs = counts > 0
                heads, types = len(totals), occurs.sum()
                columns = {
                    "head": pd.array(np.repeat(np.arange(1, heads + 1), types), dtype="Int64"),
                    "key_type": np.tile(np.array(["all", *TOKEN_TYPES])[occurs], heads),
                    "term": term,
                    "contribution": (totals[:, occurs] / counts[occurs]).ravel(),
                    "pairs": np.tile(counts[occurs].astype(int), heads),
                }
                frames.append(pd.DataFrame({"layer": layer, **columns}))
        table = pd.concat(frames, ignore_index=True)
        return table.sort_values(["layer", "head"], kind="stable").reset_index(drop=True)
