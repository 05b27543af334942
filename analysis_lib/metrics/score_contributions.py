"""Contribution of each dimension of the attention input to the scores."""

import numpy as np

from analysis_lib.capture import SCORES, Activations
from analysis_lib.metrics.accumulator import (
    Columns,
    LayerSums,
    Metric,
    kinds_of,
    type_means,
)


class ScoreContributions(Metric):
    """Mean contribution C_j of each dimension of the attention input to the scores.

    Source: Maruta and Matsuzaki 2024, eq. 7.

    For one pair, C = (q_m W_K) ∘ x_n with q_m the query after bias, and keys W_K x_n + b_K. The sum
    over pairs factors, Σ_m Σ_n C = ((Σ_m q_m) W_K) ∘ Σ_n x_n, so no pair is formed; over
    dimensions, the C_j of a pair add up to its score minus the terms that do not depend on the
    key's input (``score_terms``). For masks, rotations, norms of keys and relative positions, see
    :class:`~analysis_lib.capture.ScoreSums` (``capture/score_sums.py``).

    Columns: layer, head, dimension (from 0), key_type (all, or a type of token), contribution, the
    mean of C_j over the pairs of a query and a key that it may see, before scaling, with its 95 %
    interval; and pairs, the number of pairs. A type that does not occur has no row.
    """

    name = "score_contributions"
    needs = frozenset({SCORES})
    interval = "contribution"
    counts = "pairs"
    axes = ("head", "key_type", "dimension")
    order = ("layer", "head", "dimension", "key_type")

    def update(self, activations: Activations) -> None:
        if activations.scores is None:
            return
        scores = activations.scores
        layer = activations.layer
        # Each type has a sum of its own, since most types never occur: in a large model, these are
        # the largest sums of all.
        for index, kind in enumerate(scores.visibility.keys.kinds):
            of_kind = scores.contributions[:, :, index]
            self.add_runs(("sum", kind, layer), of_kind, activations)
        self.add(("pairs", layer), scores.visibility.pairs, activations)

    def rows(self, sums: LayerSums) -> Columns:
        occur = sums.whole["pairs"] > 0
        totals = [sums["sum", kind] for kind in np.flatnonzero(occur).tolist()]
        means, pairs = type_means(np.stack(totals, 2), sums["pairs"], occur)
        return {"key_type": kinds_of(occur, self.types), "contribution": means, "pairs": pairs}


class ScoreTerms(Metric):
    """Terms of the scores of a head: key content, relative positions and key bias.

    Columns: layer, head, key_type (all, or a type of token), term, contribution, the mean over the
    pairs of a query and a key that it may see, before scaling, with its 95 % interval; and pairs,
    the number of pairs. The terms are ``content``, q · W_K x_n (Σ_j C_j minus the next term);
    ``position_query``, the position-to-content scores of DeBERTa; ``key_bias``, q · b_K, including
    the bias of a LayerNorm of keys; and ``position``, the scores that do not depend on the key's
    input: relative position biases (T5, MPNet, BEiT), and DeBERTa's content-to-position scores.
    They add up to the mean score. A term that the architecture lacks has no row.
    """

    name = "score_terms"
    needs = frozenset({SCORES})
    interval = "contribution"
    counts = "pairs"
    axes = ("head", "term", "key_type")
    order = ("layer", "head", "key_type", "term")

    def update(self, activations: Activations) -> None:
        if activations.scores is None:
            return
        scores = activations.scores
        layer = activations.layer
        for term, sums in scores.terms.items():
            self.add_runs(("sum", term, layer), sums.unsqueeze(-1), activations)
        self.add(("pairs", layer), scores.visibility.pairs, activations)

    def rows(self, sums: LayerSums) -> Columns:
        occur = sums.whole["pairs"] > 0
        terms = sums.parts("sum")
        totals = np.stack([sums["sum", term][:, :, occur] for term in terms], 2)
        means, pairs = type_means(totals, sums["pairs"], occur)
        return {
            "term": np.array(terms),
            "key_type": kinds_of(occur, self.types),
            "contribution": means[..., 0],
            "pairs": pairs[..., 0],
        }
