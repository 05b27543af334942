"""How much attention each part of an image receives."""

import numpy as np
import torch

from analysis_lib.capture import BLOCKS, Activations
from analysis_lib.metrics.accumulator import Columns, LayerSums, Metric, means_of

# Queries whose attention is averaged: all, and those that are no part of the image.
QUERIES = ("all", "text")


class AttentionInImage(Metric):
    """Attention that each part of an image receives, by its row and column: a map of the picture.

    For the token n of an image it is the weight α_mn, averaged over the heads and over the queries
    m that see it, and over images with as many rows and columns. Under a causal mask, more queries
    see the first part of an image than the last; even is the same for attention that is spread
    evenly over the keys that each query sees. Columns: layer, queries (all; or text, those that are
    no part of the image), cell (the number of the token in the image, from 0), rows and columns
    (the size of the grid), row and column (from 0, from the top left), received in [0, 1], with its
    95 % interval, even, and images, their number. Tokens whose place is not known, such as those of
    an image in crops, have no row. Made on request.
    """

    name = "attention_in_image"
    columns = ("received", "even", "images")
    needs = frozenset({BLOCKS})
    axes = ("queries", "cell")
    interval = "received"
    limits = (0, 1)
    on_request = True
    reason_for_none = (
        "no layer has tokens of an image whose row and column are known: leave it out, or give "
        "images with texts to a model that does not cut them into crops"
    )

    def update(self, activations: Activations) -> None:
        attention = activations.attention
        if attention is None or attention.visibility.keys.cells is None:
            return
        visibility = attention.visibility
        layer = activations.layer
        cells = visibility.keys.cells
        grid = "x".join(map(str, visibility.keys.grid))
        is_image = cells[0] >= 0
        counted = attention.counted
        groups = [counted]
        if attention.is_to_itself:
            groups.append(counted & (cells < 0))
        received = []
        even = []
        for queries in groups:
            weights = attention.reduce(lambda block, queries=queries: block.received(queries))
            numbers = queries.double()
            spread = numbers / attention.key_counts.clamp_min(1)
            both = visibility.over_queries(torch.stack([numbers, spread], -1))
            seen, evenly = both.expand(-1, cells.shape[1], -1).unbind(-1)
            shares = weights.double().mean(1) / seen.clamp_min(1)
            received.append(shares[:, is_image])
            even.append((evenly / seen.clamp_min(1))[:, is_image])
        for name, values in (("received", received), ("even", even)):
            while len(values) < len(QUERIES):
                values.append(torch.zeros_like(values[0]))
            self.add((name, grid, layer), torch.stack(values, 1), activations)
        images = counted.new_ones(len(cells), dtype=torch.double)
        self.add(("images", grid, layer), images, activations)

    def rows(self, sums: LayerSums) -> Columns:
        parts: dict[str, list[np.ndarray]] = {}
        for grid in sorted(sums.parts("images")):
            rows, columns = map(int, grid.split("x"))
            count = rows * columns
            images = sums["images", grid][:, None, None]
            cell = np.arange(count)
            shape = (len(images), len(QUERIES), count)
            of_grid = {
                "cell": cell,
                "rows": np.full(shape, rows),
                "columns": np.full(shape, columns),
                "row": np.broadcast_to(cell // columns, shape),
                "column": np.broadcast_to(cell % columns, shape),
                "received": means_of(sums["received", grid], images),
                "even": means_of(sums["even", grid], images),
                "images": np.broadcast_to(images, shape).astype(int),
            }
            for name, values in of_grid.items():
                parts.setdefault(name, []).append(values)
        joined = {name: np.concatenate(values, -1) for name, values in parts.items()}
        return joined | {"queries": np.array(QUERIES)}
