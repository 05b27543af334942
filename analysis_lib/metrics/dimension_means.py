"""Mean value of every dimension of the hidden state."""

import numpy as np
import pandas as pd

from analysis_lib.capture import Activations
from analysis_lib.metrics.accumulator import Metric, Sums, tabulated, type_means
from analysis_lib.models import TOKEN_TYPES


class DimensionMeans(Metric):
    """Mean of each dimension of the hidden state, over all tokens and per token type.

    Columns: layer, dimension (from 0), token_type (all, cls, sep, first, punct, other) and mean, in the units of the
    hidden state (Maruta and Matsuzaki 2024, sec. 2.1 and 3). A type that does not occur has no row.
    """

    name = "dimension_means"
    needs = frozenset({"hidden"})

    def update(self, activations: Activations) -> None:
        if (hidden := activations.spaces.get("hidden")) is not None:
            tokens, layer = hidden.tokens, activations.layer
            counts = (tokens.type_masks * tokens.counted.unsqueeze(1)).sum(-1)
            self.add(("sum", layer), hidden.counted_type_sums.squeeze(1), activations)
            self.add(("tokens", layer), counts[:, tokens.counted_types], activations)

    def points(self, sums: Sums) -> pd.DataFrame:
        def rows(layer: int) -> pd.DataFrame:
            by_type, tokens = sums["sum", layer], sums["tokens", layer]
            means, _, types = type_means(by_type, tokens, TOKEN_TYPES[-len(tokens) :])
            width = by_type.shape[-1]
            columns = {
                "dimension": np.tile(np.arange(width), len(types)),
                "token_type": np.repeat(types, width),
                "mean": means.ravel(),
            }
            return pd.DataFrame({"layer": layer, **columns})

        return tabulated(sums, "sum", rows)
