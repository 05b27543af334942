"""Fosse et al. (2023), section 5: what the paper asks, and what it says of attention as an explanation."""

from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float

from analysis_lib.metrics.intervals import seed_interval
from analysis_lib.papers.fosse.seeds import FOSSE
from analysis_lib.papers.fosse.counts import simplex_cosine
from analysis_lib.papers.fosse.similarity import TOLD_APART
from analysis_lib.papers.fosse.tokens import fewer_flips
from analysis_lib.papers.old_claims import Estimate, EstimatedClaim, estimated

# The entropy of attention that counts as nearly uniform, divided by the logarithm of the number of keys.
NEARLY_UNIFORM = 0.9
# Cosines of class means this close to −1/(K−1) count as those of directions as far apart as can be.
FAR_APART = 0.25
# Tokens are keywords where so few of a text carry more than half of the contributions.
FEW = 3


def _widest(estimates: Iterable[Estimate]) -> Estimate:
    """The mean over seeds, and the lowest and the highest end of their intervals."""
    value, low, high = np.transpose([*estimates])
    return float(value.mean()), float(low.min()), float(high.max())


def _columns(found: pd.DataFrame, name: str) -> Estimate:
    return _widest(found[[name, f"{name}_low", f"{name}_high"]].to_numpy())


def fosse_count_verdicts(found: pd.DataFrame) -> pd.DataFrame:
    """Whether there is a direction a class when there are more than three.

    Args:
        found: from ``class_counts.directions_by_count``.

    Returns:
        The columns of ``verdicts``: two rows for each number of classes above three. Intervals reach from the lowest
        end of those of the seeds, over utterances, to the highest.
    """
    claims: list[EstimatedClaim] = []
    for count, rows in found[found["classes"] > 3].groupby("classes"):
        cosine, low, high = _columns(rows, "cosine")
        limit = simplex_cosine(count) + FAR_APART
        claims += [
            (
                "sec. 5, question",
                f"The direction tells the class, of {count}.",
                "area under the ROC curve of the cosine to a representative, mean over representatives and classes",
                TOLD_APART,
                _columns(rows, "auc"),
            ),
            (
                "sec. 5, question",
                f"The directions of {count} classes are nearly as far apart as can be.",
                f"{limit:.3f} (−1/(K−1) and {FAR_APART}) minus the mean cosine of two class means",
                0.0,
                (limit - cosine, limit - high, limit - low),
            ),
        ]
    return estimated(claims, FOSSE)


def fosse_token_verdicts(
    entropies: Sequence[Float[np.ndarray, " utterance"]],
    shares: Sequence[pd.DataFrame],
    flips: Sequence[Bool[np.ndarray, "utterance removed"]],
) -> pd.DataFrame:
    """Whether a classifier of one block learns keywords, and whether its attention tells which.

    Args:
        entropies: by seed, ``token_contributions.row_entropies``.
        shares: by seed, ``token_contributions.concentration`` with the rank 3.
        flips: by seed, ``token_contributions.removals``.

    Returns:
        The columns of ``verdicts``. Intervals reach from the lowest end of those of the seeds, over texts, to the
        highest.
    """
    few = pd.concat(shares).query("tokens == @FEW")
    claims: list[EstimatedClaim] = [
        (
            "sec. 5",
            "The attention of [CLS] is spread nearly uniformly.",
            "entropy of its row, normalised, mean over texts",
            NEARLY_UNIFORM,
            _widest(seed_interval(of) for of in entropies),
        ),
        (
            "sec. 5, question",
            "The model learns keywords: a few tokens carry the decision.",
            f"share of a text's |contributions| that its {FEW} largest tokens have, mean over texts",
            0.5,
            _columns(few, "contribution"),
        ),
        (
            "sec. 5",
            "Attention does not explain the decision: it does not point to the tokens that carry it.",
            "share of decisions that change without the token of the largest contribution, minus the share that change "
            "without the token of the largest weight",
            0.0,
            _widest(map(fewer_flips, flips)),
        ),
    ]
    return estimated(claims, FOSSE)
