"""Attention rows: entropy, weight by type of key, and the attention that each key receives."""

import numpy as np
from torch import Tensor

from analysis_lib.capture import BLOCKS, WEIGHTS, Activations
from analysis_lib.capture.long_sums import weighted_sums
from analysis_lib.metrics.accumulator import Columns, LayerSums, Metric, means_of
from analysis_lib.metrics.slots import slot_positions, slot_types, slots_of, with_all

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
        counted = attention.counted.unsqueeze(1)
        seen = attention.key_counts.unsqueeze(1)
        self.add(("nats", layer), (attention.entropy, counted), activations, _nats)
        parts = (attention.entropy, seen, counted)
        self.add(("normalised", layer), parts, activations, _normalised)
        self.add(("rows", layer), attention.visibility.queries.counts, activations)
        self.add(("normalised_rows", layer), (seen, counted), activations, _normalised_rows)

    def rows(self, sums: LayerSums) -> Columns:
        rows = sums["rows"][:, None]
        several = sums["normalised_rows"][:, None]
        return {
            "entropy_nats": sums["nats"] / rows,
            "entropy_normalised": means_of(sums["normalised"], several),
        }


def _nats(entropy: Tensor, counted: Tensor) -> Tensor:
    return (entropy.double() * counted).sum(-1)


def _has_several(seen: Tensor, counted: Tensor) -> Tensor:
    """Whether a row counts and has several keys."""
    return counted & (seen > 1)


def _normalised(entropy: Tensor, seen: Tensor, counted: Tensor) -> Tensor:
    largest = seen.clamp_min(2).log()
    return (entropy.double() / largest * _has_several(seen, counted)).sum(-1)


def _normalised_rows(seen: Tensor, counted: Tensor) -> Tensor:
    return _has_several(seen, counted).sum((-1, -2))


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
        mass = weighted_sums(counted[:, None, None], attention.mass).squeeze(2)
        self.add(("mass", layer), mass, activations)
        self.add(("queries", layer), attention.visibility.queries.counts, activations)
        self.add(("pairs", layer), attention.pairs, activations)
        self.add(("uniform", layer), attention.uniform, activations)

    def rows(self, sums: LayerSums) -> Columns:
        occur = sums.whole["pairs"] > 0
        queries = sums["queries"][:, None, None]
        mass = sums["mass"][..., occur]
        uniform = sums["uniform"][:, None, occur]
        pairs = sums["pairs"][:, None, occur]
        types = (*self.types, "sink")[: len(occur)]
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
        weights = attention.reduce(lambda block: block.received(attention.counted))
        slots = visibility.keys.once(slots_of)
        query_counts = visibility.query_counts.unsqueeze(1)
        parts = (weights, query_counts, slots)
        self.add(("received", layer), parts, activations, _received)
        self.add(("sinks", layer), parts, activations, _sinks)
        self.add(("keys", layer), (query_counts, slots), activations, _keys)

    def rows(self, sums: LayerSums) -> Columns:
        occur = with_all(sums.whole["keys"] > 0) > 0
        received = with_all(sums["received"])[..., occur]
        sinks = with_all(sums["sinks"])[..., occur]
        keys = with_all(sums["keys"])[:, None, occur]
        return {
            "position": slot_positions(self.types)[occur],
            "key_type": slot_types(self.types)[occur],
            "received": means_of(received, keys),
            "sink_rate": means_of(sinks, keys),
            "keys": keys.astype(int),
        }


def _seen_slots(query_counts: Tensor, slots: Tensor) -> Tensor:
    """The slots of keys that a counted query sees."""
    return slots * (query_counts > 0)


def _shares(weights: Tensor, query_counts: Tensor) -> Tensor:
    """Mean weight of each key over the queries that see it."""
    return weights.double() / query_counts.clamp_min(1)


def _received(weights: Tensor, query_counts: Tensor, slots: Tensor) -> Tensor:
    """Shares of the keys, summed by slot."""
    return _shares(weights, query_counts) @ _seen_slots(query_counts, slots).mT


def _sinks(weights: Tensor, query_counts: Tensor, slots: Tensor) -> Tensor:
    """Number of keys by slot that are sinks."""
    is_sink = _shares(weights, query_counts) > SINK
    return is_sink.double() @ _seen_slots(query_counts, slots).mT


def _keys(query_counts: Tensor, slots: Tensor) -> Tensor:
    return _seen_slots(query_counts, slots).sum(-1)
