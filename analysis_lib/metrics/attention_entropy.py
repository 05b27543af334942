"""Entropy of the attention rows."""

import numpy as np
import pandas as pd

from analysis_lib.capture import WEIGHTS, Activations
from analysis_lib.metrics.accumulator import Metric, Sums, head_rows, tabulated


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
        def rows(layer: int) -> pd.DataFrame:
            several = sums["normalised_rows", layer]
            normalised = sums["normalised", layer] / np.where(several > 0, several, np.nan)
            columns = {"entropy_nats": sums["nats", layer] / sums["rows", layer], "entropy_normalised": normalised}
            return head_rows(layer, columns)

        return tabulated(sums, "nats", rows)
