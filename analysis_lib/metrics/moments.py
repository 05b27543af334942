"""Second moments of vectors, for metrics that need a whole covariance: d² numbers per head."""

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from analysis_lib.capture import Activations
from analysis_lib.capture.vectors import Vectors
from analysis_lib.errors import AnalysisError
from analysis_lib.metrics.accumulator import Metric, Name, chosen_spaces

# Two matrices of this width take 1 GiB per layer.
WIDEST = 8192
# A variance below this share of the mean square is rounding error: the vectors are all the same.
ROUNDING = 1e-13


class SecondMoments(Metric):
    """A metric that keeps Σ x xᵀ of the vectors of each layer and head, once for the whole corpus.

    Args:
        spaces: the spaces to measure, from hidden, final, query, key, value, query_unrotated and
            key_unrotated.
        vectors_of, bins: see :class:`~analysis_lib.metrics.accumulator.Metric`.
    """

    needs: frozenset[str] = frozenset({"hidden"})
    axes = ("head",)
    by_space = True
    on_request = True

    def __init__(
        self,
        spaces: Sequence[str] = ("hidden",),
        vectors_of: str = "token",
        bins: str | None = None,
    ) -> None:
        super().__init__(vectors_of, bins)
        self.needs = chosen_spaces(spaces)

    def add_moments(
        self,
        space: str,
        vectors: Vectors,
        activations: Activations,
    ) -> Float[Tensor, "head place dim"]:
        """Add the number, the sum and the second moment of the vectors that count.

        Returns:
            The vectors of all utterances in a row, 0 where a token does not count.

        Raises:
            AnalysisError: the vectors have too many dimensions.
        """
        layer = activations.layer
        dimensions = vectors.values.shape[-1]
        if dimensions > WIDEST:
            raise AnalysisError(
                f"{self.name}: the {space} vectors of layer {layer} have {dimensions} dimensions, "
                f"and their second moments are kept up to {WIDEST}: measure {space} vectors of "
                f"fewer dimensions, or leave {self.name} out"
            )
        counts = vectors.counts.unsqueeze(1).expand_as(vectors.nonzero)
        self.add(("tokens", space, layer), counts, activations)
        # In float64, the mean may be 10⁵ times as long as the spread before the covariance, a
        # difference of the two, loses digits that float32 vectors have; and the sums stay
        # mergeable.
        counted = (vectors.norms != 0).unsqueeze(-1)
        values = torch.where(counted, vectors.values, 0).double()
        values = values.transpose(0, 1).flatten(1, 2)
        self.add_whole(("sum", space, layer), values.sum(1))
        self.add_whole(("moment", space, layer), values.mT @ values)
        return values

    def leaving_out(self) -> Callable[..., pd.DataFrame]:
        """Not available: the second moments are not kept by group.

        Raises:
            AnalysisError: always.
        """
        if self.interval is None:
            instead = "measure parts of the corpus, and take an interval over these"
        else:
            instead = "use the ci_low and ci_high that the table has, or the anisotropy table"
        raise AnalysisError(
            f"{self.name} cannot leave a group of utterances out, so a number made from its table "
            f"has no interval: {instead}"
        )


def covariance(
    sums: dict[Name, np.ndarray],
) -> Float[np.ndarray, "head dim dim"]:
    """The covariance of all vectors, zero vectors included; 0 where it is below rounding error.

    Args:
        sums: those of :meth:`SecondMoments.add_moments`, of the whole corpus.
    """
    tokens = sums["tokens"][..., None, None]
    mean = sums["sum"] / tokens[..., 0]
    moment = sums["moment"] / tokens
    around_mean = moment - mean[..., :, None] * mean[..., None, :]
    variance = np.trace(around_mean, axis1=-2, axis2=-1)
    power = np.trace(moment, axis1=-2, axis2=-1)
    is_there = variance > ROUNDING * power
    return np.where(is_there[..., None, None], around_mean, 0.0)
