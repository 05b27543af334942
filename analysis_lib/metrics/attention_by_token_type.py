"""Where attention goes: weight per type of key."""

import numpy as np
import pandas as pd

from analysis_lib.capture import WEIGHTS, Activations
from analysis_lib.metrics.accumulator import Metric, Sums, tabulated
from analysis_lib.models import TOKEN_TYPES


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
        def rows(layer: int) -> pd.DataFrame:
            total, pairs = sums["mass", layer], sums["pairs", layer]
            occurs = pairs > 0
            heads = len(total)
            columns = {
                "head": pd.array(np.repeat(np.arange(1, heads + 1), occurs.sum()), dtype="Int64"),
                "key_type": np.tile(np.array(TOKEN_TYPES)[occurs], heads),
                "mass": (total / sums["queries", layer])[:, occurs].ravel(),
                "weight": (total[:, occurs] / pairs[occurs]).ravel(),
            }
            return pd.DataFrame({"layer": layer, **columns})

        return tabulated(sums, "mass", rows)
