"""Attention rows: entropy, weight by type of key, and the attention that each key receives."""

import numpy as np

from analysis_lib.capture import BLOCKS, WEIGHTS, Activations
from analysis_lib.metrics.accumulator import KEY_TYPES, Columns, LayerSums, Metric, means_of
from analysis_lib.metrics.slots import SLOT_POSITIONS, SLOT_TYPES, slots_of, with_all

# Attention that makes a key a sink, averaged over the queries that see it (Gu et al. 2025, sec.
# 3.1).
SINK = 0.3


class AttentionEntropy(Metric):
    """Mean entropy of the attention rows of a head.

    Columns: layer, head, entropy_nats, the mean of −Σ p ln p over queries; and entropy_normalised
    in [0, 1], the mean of the entropy over ln n, its largest value for the n keys that the query
    may see, with its 95 % interval. A row with one key has entropy 0 and no normalised entropy, so
    it counts only in the first mean (the second is NaN where no row has two keys).
    """

    name = "attention_entropy"
    needs = frozenset({WEIGHTS})
    axes = ("head",)
    interval = "entropy_normalised"
    limits = (0, 1)

    def update(self, activations: Activations) -> None:
        attention = activations.attention
        layer = activations.layer
        if attention is None:
            return
        entropy = attention.entropy.double()
        key_counts = attention.key_counts
        counted = attention.counted.double().unsqueeze(1)
        several = counted * (key_counts > 1).unsqueeze(1)
        largest = key_counts.clamp_min(2).log().unsqueeze(1)
        nats = (entropy * counted).sum(-1)
        normalised = (entropy / largest * several).sum(-1)
        self.add(("nats", layer), nats, activations)
        self.add(("normalised", layer), normalised, activations)
        self.add(("rows", layer), counted.sum((1, 2)), activations)
        self.add(("normalised_rows", layer), several.sum((1, 2)), activations)

    def rows(self, sums: LayerSums) -> Columns:
        rows = sums["rows"][:, None]
        several = sums["normalised_rows"][:, None]
        return {
            "entropy_nats": sums["nats"] / rows,
            "entropy_normalised": means_of(sums["normalised"], several),
        }


class AttentionByTokenType(Metric):
    """Attention that keys of each type receive (Maruta and Matsuzaki 2024, sec. 2.2).

    Columns: layer, head, key_type (a type of token, or ``sink``: a learnt logit that takes weight
    and gives no value), mass in [0, 1], the total weight that a query gives to the keys of the
    type, mean over queries, which sums to 1 over types; weight in [0, 1], the mean weight of a pair
    of a query and a key of the type that it may see, with its 95 % interval; and uniform_mass and
    uniform_weight, the same for attention that is spread evenly over the keys that a query may see.
    Under a causal mask, even attention gives the first token more than others: a model favours it
    only where its weight is above uniform_weight. A type that does not occur has no row.
    """

    name = "attention_by_token_type"
    needs = frozenset({WEIGHTS})
    interval = "weight"
    limits = (0, 1)
    axes = ("head", "key_type")

    def update(self, activations: Activations) -> None:
        attention = activations.attention
        layer = activations.layer
        if attention is None:
            return
        counted = attention.counted.to(attention.mass.dtype)
        mass = (counted[:, None, None] @ attention.mass).squeeze(2)
        queries = attention.counted.sum(1).double()
        self.add(("mass", layer), mass, activations)
        self.add(("queries", layer), queries, activations)
        self.add(("pairs", layer), attention.pairs, activations)
        self.add(("uniform", layer), attention.uniform, activations)

    def rows(self, sums: LayerSums) -> Columns:
        occur = sums.whole["pairs"] > 0
        queries = sums["queries"][:, None, None]
        mass = sums["mass"][..., occur]
        uniform = sums["uniform"][:, None, occur]
        pairs = sums["pairs"][:, None, occur]
        types = KEY_TYPES[1 : 1 + len(occur)]
        return {
            "key_type": np.array(types)[occur],
            "mass": mass / queries,
            "weight": means_of(mass, pairs),
            "uniform_mass": uniform / queries,
            "uniform_weight": means_of(uniform, pairs),
        }


class AttentionReceived(Metric):
    """Attention that a key receives: its weight, averaged over the queries that see it.

    Source: Gu et al. 2025, sec. 3.1.

    Columns: layer, head, position (1 for the first token, up to 8; missing where it does not
    matter), key_type (all, or a type of token), received in [0, 1], mean over such keys, with its
    95 % interval; sink_rate in [0, 1], the share of them that receive more than 0.3; and keys,
    their number. Keys that no counted query sees are left out. Made on request.
    """

    name = "attention_received"
    needs = frozenset({BLOCKS})
    interval = "received"
    limits = (0, 1)
    counts = "keys"
    axes = ("head", "position")
    optional = ("head", "position")
    on_request = True

    def update(self, activations: Activations) -> None:
        attention = activations.attention
        layer = activations.layer
        if attention is None:
            return
        visibility = attention.visibility
        counted = attention.counted.double()
        weights = attention.reduce(lambda block: block.received(counted))
        # Number of queries that see each key: a single number where all queries see all keys.
        queries = visibility.over_queries(counted.unsqueeze(-1)).squeeze(-1)
        share = weights.double() / queries.clamp_min(1).unsqueeze(1)
        is_seen = (queries > 0).expand_as(visibility.keys.mask)
        slots = slots_of(visibility.keys) * is_seen.unsqueeze(1)
        slots = slots.transpose(1, 2)
        is_sink = (share > SINK).double()
        self.add(("received", layer), share @ slots, activations)
        self.add(("sinks", layer), is_sink @ slots, activations)
        self.add(("keys", layer), slots.sum(1), activations)

    def rows(self, sums: LayerSums) -> Columns:
        occur = with_all(sums.whole["keys"] > 0) > 0
        received = with_all(sums["received"])[..., occur]
        sinks = with_all(sums["sinks"])[..., occur]
        keys = with_all(sums["keys"])[:, None, occur]
        return {
            "position": SLOT_POSITIONS[occur],
            "key_type": SLOT_TYPES[occur],
            "received": means_of(received, keys),
            "sink_rate": means_of(sinks, keys),
            "keys": keys.astype(int),
        }
