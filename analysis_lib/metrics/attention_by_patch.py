"""Where in a picture attention goes: the weight of each patch."""

import numpy as np
from torch import Tensor
from torch.nn import functional

from analysis_lib.capture import BLOCKS, Activations
from analysis_lib.errors import AnalysisError
from analysis_lib.metrics.accumulator import Columns, LayerSums, Metric, means_of


class AttentionByPatch(Metric):
    """Attention that a patch of a picture receives, by its place in the picture.

    For the patch in row r and column c it is the weight α_mn of its token n, averaged over the
    queries m that see it, and then over pictures; with ``bins="type"`` or ``bins="position"``, over
    some of the queries, such as those of the words behind a picture. Columns: layer, head, row and
    column (from 1, at the top left), weight in [0, 1], with its 95 % interval, and pictures, their
    number. Layers have rows where keys are patches, or the tokens of a picture in a text, and their
    grid is known: from the processor, from tokens that end rows, or from the picture's shape.
    Pictures of several grids have no common map. Made on request.
    """

    name = "attention_by_patch"
    needs = frozenset({BLOCKS})
    axes = ("head", "row", "column")
    interval = "weight"
    limits = (0, 1)
    counts = "pictures"
    on_request = True
    reason_for_none = "no layer has the patches of a picture in a known grid as keys: leave it out"

    def update(self, activations: Activations) -> None:
        attention = activations.attention
        if attention is None or attention.visibility.keys.grid is None:
            return
        visibility = attention.visibility
        rows, columns = visibility.keys.grid
        # A word of a key is a text or a number.
        grid = f"{rows} x {columns}"
        weights = attention.reduce(lambda block: block.received(attention.counted))
        patches = functional.one_hot(visibility.keys.patches + 1, 1 + rows * columns)
        patches = patches[..., 1:].double()
        counts = visibility.query_counts.expand(patches.shape[:2])
        received = weights.double() / counts.clamp_min(1).unsqueeze(1)
        layer = activations.layer
        self.add(("received", grid, layer), received @ patches, activations)
        self.add(("pictures", grid, layer), _seen(counts, patches), activations)

    def rows(self, sums: LayerSums) -> Columns:
        grids = sums.parts("pictures")
        if len(grids) > 1:
            shapes = " and of ".join(grids)
            raise AnalysisError(
                f"{self.name}: the pictures have patches of {shapes}: give pictures of one shape"
            )
        (grid,) = grids
        rows, columns = map(int, grid.split(" x "))
        received = sums["received", grid]
        pictures = sums["pictures", grid][:, None]
        weights = means_of(received, pictures)
        shape = *received.shape[:2], rows, columns
        return {
            "row": np.arange(1, rows + 1),
            "column": np.arange(1, columns + 1),
            "weight": weights.reshape(shape),
            "pictures": pictures.astype(int).reshape(len(pictures), 1, rows, columns),
        }


def _seen(counts: Tensor, patches: Tensor) -> Tensor:
    """1 for each patch of an utterance that a counted query sees, else 0."""
    is_seen = (counts > 0).double().unsqueeze(1)
    return (is_seen @ patches).squeeze(1)
