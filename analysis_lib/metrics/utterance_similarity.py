"""Similarity inside an utterance."""

import numpy as np
import pandas as pd
import torch

from analysis_lib.capture import Activations
from analysis_lib.errors import AnalysisError
from analysis_lib.metrics.accumulator import VECTOR_SPACES, Metric, Sums, head_rows, tabulated


class UtteranceSimilarity(Metric):
    """Mean cosine of the token pairs of an utterance, averaged over utterances (Fosse et al. 2023, eq. 3).

    For an utterance of n tokens it is (‖Σ u_i‖² − n) / (n (n − 1)); only utterances of two tokens or more
    count, each once, however long. Columns: space, layer, head (missing for hidden), similarity in
    [−1, 1], its 95 % interval, and utterances, how many counted.
    """

    name = "utterance_similarity"
    needs = frozenset(VECTOR_SPACES)
    interval = "similarity"
    counts = "utterances"
    of_pairs_within_utterances = True

    def update(self, activations: Activations) -> None:
        for space, vectors in self.vectors(activations):
            count = vectors.nonzero
            square = vectors.unit_sum.double().square().sum(-1)
            similarity = torch.where(count > 1, (square - count) / (count * (count - 1)).clamp_min(1), 0)
            self.add(("similarity", space, activations.layer), similarity, activations)
            self.add(("utterances", space, activations.layer), (count > 1).double(), activations)

    def points(self, sums: Sums) -> pd.DataFrame:
        def rows(space: str, layer: int) -> pd.DataFrame:
            count = sums["utterances", space, layer]
            mean = sums["similarity", space, layer] / np.where(count > 0, count, np.nan)
            return head_rows(layer, {"similarity": mean, "utterances": count.astype(int)}, space)

        return tabulated(sums, "similarity", rows)

    def table(self) -> pd.DataFrame:
        table = super().table()
        if (table["utterances"] == 0).any():
            raise AnalysisError("utterance_similarity needs an utterance of two tokens or more: give longer text")
        return table
