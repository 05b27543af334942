"""Attention rows: their entropy, and the weight that they give to keys of each type."""

import numpy as np

from analysis_lib.capture import WEIGHTS, Activations
from analysis_lib.metrics.accumulator import KEY_TYPES, Columns, LayerSums, Metric


class AttentionEntropy(Metric):
    """Mean entropy of the attention rows of a head.

    Columns: layer, head, entropy_nats, the mean of −Σ p ln p over queries; and entropy_normalised in [0, 1], the
    mean of the entropy over ln n, its largest value for the n keys that the query may see, with its 95 % interval. A
    row with one key has entropy 0 and no normalised one: it counts in the first mean alone (normalised is NaN where no
    row has two keys).
    """

    name = "attention_entropy"
    needs = frozenset({WEIGHTS})
    axes = ("head",)
    interval = "entropy_normalised"
    limits = (0, 1)

    def update(self, activations: Activations) -> None:
        if activations.rows is None:
            return
        tokens, layer = activations.tokens, activations.layer
        entropy, keys = activations.rows.entropy.double(), activations.rows.keys
        counted = tokens.counted.double().unsqueeze(1)
        several = (counted * (keys > 1).unsqueeze(1)).double()
        self.add(("nats", layer), (entropy * counted).sum(-1), activations)
        self.add(("normalised", layer), (entropy / keys.clamp_min(2).log().unsqueeze(1) * several).sum(-1), activations)
        self.add(("rows", layer), tokens.counts, activations)
        self.add(("normalised_rows", layer), several.sum((1, 2)), activations)

    def rows(self, sums: LayerSums) -> Columns:
        every, several = sums["rows"][:, None], sums["normalised_rows"][:, None]
        normalised = sums["normalised"] / np.where(several > 0, several, np.nan)
        return {"entropy_nats": sums["nats"] / every, "entropy_normalised": normalised}


class AttentionByTokenType(Metric):
    """The attention that keys of each type receive (Maruta and Matsuzaki 2024, sec. 2.2).

    Columns: layer, head, key_type (a type of token, or ``sink``: a learnt logit that takes weight and gives no value),
    mass in [0, 1], the total weight that a query gives to the keys of the type, mean over queries, which sums to 1 over
    types; weight in [0, 1], the mean weight of a pair of a query and a key of the type that it may see, with its 95 %
    interval; and uniform_mass and uniform_weight, the same for
    attention that is spread evenly over the keys that a query may see. Under a causal mask, that gives the first token
    more than others: a model gives it much where its weight is above this. A type that does not occur has no row.
    """

    name = "attention_by_token_type"
    needs = frozenset({WEIGHTS})
    interval = "weight"
    limits = (0, 1)
    axes = ("head", "key_type")

    def update(self, activations: Activations) -> None:
        if activations.rows is None:
            return
        layer = activations.layer
        self.add(("mass", layer), activations.rows.type_mass, activations)
        self.add(("queries", layer), activations.tokens.counts, activations)
        self.add(("pairs", layer), activations.rows.pairs, activations)
        self.add(("uniform", layer), activations.rows.uniform, activations)

    def rows(self, sums: LayerSums) -> Columns:
        occur = sums.whole["pairs"] > 0
        queries = sums["queries"][:, None, None]
        mass = sums["mass"][..., occur]
        uniform = sums["uniform"][:, None, occur]
        pairs = sums["pairs"][:, None, occur]
        pairs = np.where(pairs > 0, pairs, np.nan)
        return {
            "key_type": np.array(KEY_TYPES[1:])[: len(occur)][occur],
            "mass": mass / queries,
            "weight": mass / pairs,
            "uniform_mass": uniform / queries,
            "uniform_weight": uniform / pairs,
        }
