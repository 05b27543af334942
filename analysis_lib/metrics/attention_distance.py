"""Mean distance between a query and the keys that it attends to."""

from torch import Tensor

from analysis_lib.capture import BLOCKS, Activations, Block
from analysis_lib.metrics.accumulator import Columns, LayerSums, Metric


class AttentionDistance(Metric):
    """Mean distance, in tokens, between a query and the keys that it attends to.

    For query m of a head it is Σ_n α_mn |m − n| / Σ_n α_mn over the keys n of its text, a mean
    weighted by attention (Vig & Belinkov 2019; Dosovitskiy et al. 2021, sec. 4.5, in pixels). The
    denominator is 1 unless the head has a learnt sink, which has no position. Columns: layer, head,
    and distance, the mean over queries, with its 95 % interval: 0 where each token attends to
    itself. Distances follow the order of the tokens; in an image, that is row by row over its
    patches. Attention whose keys are not the tokens of its queries, such as that of a decoder to an
    encoder, has no row. Made on request, because attention weights are computed once more.
    """

    name = "attention_distance"
    needs = frozenset({BLOCKS})
    axes = ("head",)
    interval = "distance"
    limits = (0, float("inf"))
    on_request = True
    reason_for_none = (
        "no layer has keys that are the tokens of its queries, so that there is no distance: "
        "leave it out"
    )

    def update(self, activations: Activations) -> None:
        attention = activations.attention
        layer = activations.layer
        if attention is None or not attention.is_to_itself:
            return

        def distances(block: Block) -> Tensor:
            apart = (block.query_positions[:, None] - block.key_positions).abs()
            return (block.average(apart) * block.of_queries(attention.counted)).sum(-1)

        self.add(("distance", layer), attention.reduce(distances), activations)
        self.add(("queries", layer), attention.visibility.queries.counts, activations)

    def rows(self, sums: LayerSums) -> Columns:
        return {"distance": sums["distance"] / sums["queries"][:, None]}
