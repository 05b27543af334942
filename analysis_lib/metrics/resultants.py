"""How closely queries and keys gather around one direction, at each distance from the start."""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from analysis_lib.capture import UNROTATED, Activations, Tokens
from analysis_lib.capture.long_sums import weighted_sums
from analysis_lib.metrics.accumulator import Columns, LayerSums, Metric, means_of


class ResultantByPosition(Metric):
    """Resultant length of queries and keys, by bins of positions, before and after rotation.

    The resultant length of vectors is R = ‖mean of x‖ / mean of ‖x‖: 1 where all have one
    direction, near 0 where directions cancel. For vectors of one length it is the mean resultant
    length of directional statistics (Mardia & Jupp 2000, sec. 9.2). Mao et al. 2026 find queries
    and keys "concentrated around fixed non-zero centers" before they are rotated by position. A
    bin has the positions from a power of two up to the next: 0, 1, 2 and 3, 4 to 7, ...; the first
    token of a text is at 0. A rotation by one position changes no R, so that only bins of several
    can lose by it.

    Columns: space (query, key, query_unrotated or key_unrotated), layer, head, from_position, the
    first of the bin; resultant in [0, 1], with its 95 % interval; cosine_to_mean in [−1, 1], of the
    mean of the bin and that of all positions of the head, this bin included; and tokens, in the
    bin. Zero vectors count; R is missing where all are zero. A bin without tokens has no row.

    Sums by text are in the precision of the model, or in single precision if that is half; texts
    are added in float64. Memory grows with the number of bins, the logarithm of the longest text.
    Made on request, for it keeps a mean for each bin.
    """

    name = "resultant_by_position"
    needs = frozenset({"query", "key", *UNROTATED})
    axes = ("head", "from_position")
    by_space = True
    interval = "resultant"
    limits = (0, 1)
    counts = "tokens"
    on_request = True
    no_bins = "its rows are by position as they are"

    def __init__(self) -> None:
        # A vector for each text would have no position.
        super().__init__()

    def update(self, activations: Activations) -> None:
        layer = activations.layer
        for space, vectors in self.vectors(activations):
            masks = vectors.tokens.once(_bins_of)
            weights = masks.unsqueeze(1).to(vectors.values.dtype)
            totals = weighted_sums(weights, vectors.values)
            norms = vectors.every_norm.double() @ masks.mT
            parts = {
                "sum": totals.unbind(2),
                "norms": norms.unbind(2),
                "tokens": masks.sum(-1).unbind(1),
            }
            for name, of_bins in parts.items():
                for index, values in enumerate(of_bins):
                    key = name, space, index, layer
                    self.add(key, values, activations)

    def rows(self, sums: LayerSums) -> Columns:
        bins = []
        for index in sorted(sums.parts("tokens")):
            if sums.whole["tokens", index] > 0:
                bins.append(index)
        # Shape: replicate x head x bin, and x dim.
        total = _of_bins(sums, "sum", bins, 2)
        norms = _of_bins(sums, "norms", bins, 2)
        tokens = _of_bins(sums, "tokens", bins, 1)
        of_all = total.sum(2, keepdims=True)
        product = (total * of_all).sum(-1)
        length = np.linalg.norm(total, axis=-1)
        length_of_all = np.linalg.norm(of_all, axis=-1)
        first = [_first(index) for index in bins]
        return {
            "from_position": np.array(first),
            "resultant": means_of(length, norms),
            "cosine_to_mean": means_of(product, length * length_of_all),
            "tokens": tokens[:, None].astype(int),
        }


def _first(index: int) -> int:
    """The first position of a bin: 0, 1, 2, 4, 8, ...."""
    return 2**index // 2


def _bins_of(tokens: Tokens) -> Float[Tensor, "utterance bin token"]:
    """1 where a token counts and its position is in the bin, else 0."""
    position = tokens.mask.cumsum(1) - 1
    # As many as the longest text of the batch may need: looking would make a GPU wait.
    last = tokens.mask.shape[1] - 1
    bins = []
    for index in range(last.bit_length() + 1):
        is_before_next = position < _first(index + 1)
        is_inside = (position >= _first(index)) & is_before_next
        bins.append(is_inside & tokens.counted)
    return torch.stack(bins, 1).double()


def _of_bins(
    sums: LayerSums,
    name: str,
    bins: list[int],
    axis: int,
) -> np.ndarray:
    """The sums of a name by bin, along a new axis."""
    by_bin = []
    for index in bins:
        by_bin.append(sums[name, index])
    return np.stack(by_bin, axis)
