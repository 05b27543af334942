"""Similarity inside an utterance before and after fine-tuning (Fosse et al. 2023, sec. 3)."""

from collections.abc import Callable, Mapping

import numpy as np
import pandas as pd
from jaxtyping import Float

from analysis_lib.errors import AnalysisError
from analysis_lib.measurement import Tables
from analysis_lib.metrics.intervals import jackknife_interval

Curve = Float[np.ndarray, " layer"]


def paired(
    before: Tables, after: Tables, statistic: Callable[[Curve, Curve], Float[np.ndarray, " number"]]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Numbers computed from the similarities of two models by layer, with 95 % jackknife intervals over utterances.

    The same utterances are left out of both models, so that what is particular to a text drops out of a difference.

    Args:
        before, after: with ``utterance_similarity``, of the same utterances.
        statistic: computes the numbers from the similarities of hidden states, by layer from 0, the embedding output,
            before and after.

    Returns:
        The values, the lower and the upper bounds.

    Raises:
        AnalysisError: the two have different numbers of layers, or read different texts.
    """

    def curve(tables: Mapping[str, pd.DataFrame]) -> Curve:
        return tables["utterance_similarity"].query("space == 'hidden'")["similarity"].to_numpy(dtype=float)

    one, other = (np.vstack(tables.left_out(curve)) for tables in (before, after))
    if one.shape != other.shape or before.run["data_sha256"] != after.run["data_sha256"]:
        raise AnalysisError("the two do not have the same layers and texts: measure one encoder on one corpus twice")
    value, *left_out = (np.asarray(statistic(*curves)) for curves in zip(one, other, strict=True))
    return value, *jackknife_interval(value, np.reshape(left_out, (-1, len(value))))
