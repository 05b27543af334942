"""Attention rows: their entropy, and the weight that they give to keys of each type."""

import numpy as np
import pandas as pd

from analysis_lib.capture import WEIGHTS, Activations
from analysis_lib.metrics.accumulator import Columns, Metric, Sums, crossed, head_rows, tabulated
from analysis_lib.models import TOKEN_TYPES


class AttentionEntropy(Metric):
    """Mean entropy of the attention rows of a head.

    Columns: layer, head, entropy_nats, the mean of −Σ p ln p over queries; and entropy_normalised in [0, 1], the
    mean of the entropy over ln n, its largest value for the n keys that the query may see. A row with one key has
    entropy 0 and no normalised one: it counts in the first mean alone (normalised is NaN where no row has two keys).
    """

    name = "attention_entropy"
    needs = frozenset({WEIGHTS})

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

    def points(self, sums: Sums) -> pd.DataFrame:
        def rows(layer: int) -> Columns:
            several = sums["normalised_rows", layer]
            normalised = sums["normalised", layer] / np.where(several > 0, several, np.nan)
            columns = {"entropy_nats": sums["nats", layer] / sums["rows", layer], "entropy_normalised": normalised}
            return head_rows(layer, columns)

        return tabulated(sums, "nats", rows)


class AttentionByTokenType(Metric):
    """The attention that keys of each type receive (Maruta and Matsuzaki 2024, sec. 2.2).

    Columns: layer, head, key_type (cls, sep, first, punct, other), mass in [0, 1], the total weight that a query gives
    to the keys of the type, mean over queries, which sums to 1 over types; and weight in [0, 1], the mean
    weight of a pair of a query and a key of the type that it may see. A type that does not occur has no row.
    """

    name = "attention_by_token_type"
    needs = frozenset({WEIGHTS})

    def update(self, activations: Activations) -> None:
        if activations.rows is None:
            return
        layer = activations.layer
        self.add(("mass", layer), activations.rows.type_mass, activations)
        self.add(("queries", layer), activations.tokens.counts, activations)
        self.add(("pairs", layer), activations.rows.pairs, activations)

    def points(self, sums: Sums) -> pd.DataFrame:
        def rows(layer: int) -> Columns:
            total, pairs = sums["mass", layer], sums["pairs", layer]
            occurs = pairs > 0
            axes = {"head": range(1, len(total) + 1), "key_type": np.array(TOKEN_TYPES)[occurs]}
            mass, weight = total / sums["queries", layer], total[:, occurs] / pairs[occurs]
            return crossed(layer, axes, mass=mass[:, occurs], weight=weight)

        return tabulated(sums, "mass", rows)
