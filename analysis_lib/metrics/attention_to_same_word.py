"""How much a query attends to the other places where its token stands."""

from torch import Tensor

from analysis_lib.capture import BLOCKS, Activations, Block
from analysis_lib.metrics.accumulator import Columns, LayerSums, Metric


class AttentionToSameWord(Metric):
    """The attention that a query gives to the other keys with the same token id.

    For query m of a head it is Σ_n α_mn over the keys n ≠ m of its text that have its id, and 0
    where its token stands there once. Heads that attend so are the duplicate token heads of Wang et
    al. 2023, sec. 3. Columns: layer, head, and mass in [0, 1], the mean over queries, with its 95 %
    interval. A word of several characters is the same if all of them are. Where keys are not the
    tokens of the queries, or these have no ids, as patches, frames and CANINE's molecules, a layer
    has no row. Made on request: weights are formed once more.
    """

    name = "attention_to_same_word"
    needs = frozenset({BLOCKS})
    axes = ("head",)
    interval = "mass"
    limits = (0, 1)
    on_request = True
    reason_for_none = (
        "no layer has keys that are the tokens of its queries and have ids, so that no token "
        "is there twice: leave it out"
    )

    def update(self, activations: Activations) -> None:
        attention = activations.attention
        layer = activations.layer
        if attention is None or not attention.is_to_itself:
            return
        ids = attention.visibility.queries.ids
        if ids is None:
            return
        # A token has one number, or one for each of its characters.
        ids = ids.reshape(*ids.shape[:2], -1)

        def to_same_word(block: Block) -> Tensor:
            utterances, _, queries = block.part
            words = ids[utterances]
            is_same = (words[:, queries, None] == words[:, None]).all(-1)
            is_other = block.query_positions[:, None] != block.key_positions
            weights = block.weights * (is_same & is_other).unsqueeze(1)
            return (weights.sum(-1) * block.of_queries(attention.counted)).sum(-1)

        self.add(("mass", layer), attention.reduce(to_same_word), activations)
        self.add(("queries", layer), attention.visibility.queries.counts, activations)

    def rows(self, sums: LayerSums) -> Columns:
        return {"mass": sums["mass"] / sums["queries"][:, None]}
