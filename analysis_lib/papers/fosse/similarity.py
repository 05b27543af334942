"""Similarity inside an utterance before and after fine-tuning (Fosse et al. 2023, sec. 3)."""

import math
from collections.abc import Callable, Mapping

import numpy as np
import pandas as pd
from jaxtyping import Float

from analysis_lib.errors import AnalysisError
from analysis_lib.measurement import Tables
from analysis_lib.metrics.intervals import jackknife_interval
from analysis_lib.papers.claims import Estimate

Curve = Float[np.ndarray, " layer"]


def hidden(tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """The rows of ``utterance_similarity`` on hidden states, by layer from 0, the embedding output."""
    return tables["utterance_similarity"].query("space == 'hidden'").set_index("layer")


def paired(
    before: Tables, after: Tables, statistic: Callable[[Curve, Curve], Float[np.ndarray, " number"]]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Numbers computed from the similarities of two models by layer, with 95 % jackknife intervals over utterances.

    The same utterances are left out of both models, so that what is particular to a text drops out of a difference.

    Args:
        before, after: with ``utterance_similarity``, of the same utterances.
        statistic: computes the numbers from the similarity by layer before and after.

    Returns:
        The values, the lower and the upper bounds.

    Raises:
        AnalysisError: the two have different numbers of layers, or read different texts.
    """
    samples = [tables.left_out(lambda t: hidden(t)["similarity"].to_numpy(dtype=float)) for tables in (before, after)]
    one, other = map(np.vstack, samples)
    if one.shape != other.shape or before.run["data_sha256"] != after.run["data_sha256"]:
        raise AnalysisError("the two do not have the same layers and texts: measure one encoder on one corpus twice")
    value, *left_out = map(statistic, one, other)
    return value, *jackknife_interval(value, np.reshape(left_out, (-1, len(value))))


def estimates(
    before: Tables, after: Tables, statistics: Mapping[str, Callable[[Curve, Curve], float]]
) -> dict[str, Estimate]:
    """The number that decides each claim and its interval, as of :func:`paired`, by the id of the claim."""
    found = paired(before, after, lambda *curves: np.array([of_claim(*curves) for of_claim in statistics.values()]))
    return dict(zip(statistics, np.transpose(found), strict=True))


# --- What decides the claims: each from the similarity by layer of the pretrained and the fine-tuned model -----------


def last_third(depth: int) -> int:
    """The hidden layer at which the last third of the blocks begins: 8 of 12."""
    return depth - round(depth / 3)


def growing_steps(pretrained: Curve, _: Curve) -> float:
    """The share of the steps from a hidden layer to the next, without the last step, in which similarity grows."""
    return float((np.diff(pretrained[:-1]) > 0).mean()) if len(pretrained) > 2 else math.nan


def penultimate_lead(pretrained: Curve, _: Curve) -> float:
    """The similarity after the last layer but one minus the largest elsewhere."""
    return pretrained[-2] - np.delete(pretrained, -2).max()


def final_gain(pretrained: Curve, fine_tuned: Curve) -> float:
    """The similarity after the last layer, fine-tuned minus pretrained."""
    return fine_tuned[-1] - pretrained[-1]


def least_growth(_: Curve, fine_tuned: Curve) -> float:
    """The growth from a hidden layer to the next, where it is least."""
    return np.diff(fine_tuned).min()


def late_growth(_: Curve, fine_tuned: Curve) -> float:
    """The mean growth per layer in the last third of the layers minus that in the layers before."""
    steps, start = np.diff(fine_tuned), last_third(len(fine_tuned) - 1)
    return steps[start:].mean() - steps[:start].mean() if start else math.nan
