"""What the keys of each type add to the output of a head: attention weighted by values."""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from analysis_lib.capture import BLOCKS, Activations, Block
from analysis_lib.metrics.accumulator import Columns, LayerSums, Metric, means_of


class ValueWeightedAttention(Metric):
    r"""Weight of the keys of each type, and what their values add to the output of a head.

    For query m of a head, the keys of type t add c_t = Σ_{n ∈ t} α_mn v_n, and over types these sum
    to the head's output, before its output projection. A key can have much weight and add little,
    because its value is short (Kobayashi et al. 2020, who project the values first). Columns:
    layer, head, key_type (a type of token, or ``sink``, a learnt logit, which adds nothing), then
    means over queries:

    - mass, Σ_{n ∈ t} α_mn, in [0, 1], the share of the weight, which sums to 1 over types;
    - added_norm, ‖c_t‖, and rest_norm, ‖Σ c_s‖ over all other types s, in the units of values;
    - weighted_norm, Σ_{n ∈ t} α_mn ‖v_n‖, at least ‖c_t‖, since values of one type may cancel;
    - share, of that sum over queries in the same over all keys, in [0, 1], with its 95 % interval:
      near mass where values are equally long, far below it where those of the type are short.

    A type that no query sees has no row. Made on request, because attention weights are computed
    once more.
    """

    name = "value_weighted_attention"
    needs = frozenset({BLOCKS, "value"})
    axes = ("head", "key_type")
    interval = "share"
    limits = (0, 1)
    on_request = True

    def update(self, activations: Activations) -> None:
        attention = activations.attention
        layer = activations.layer
        if attention is None:
            return
        keys = attention.visibility.keys
        value = attention.by_query_head(activations.spaces["value"].values)
        of_key = keys.type_masks.to(value.dtype).mT
        masks = of_key.unsqueeze(1)
        by_type = masks.unsqueeze(-1) * value.unsqueeze(3)
        norm = torch.linalg.vector_norm(value, dim=-1, keepdim=True)
        lengths = masks * norm

        def added(block: Block) -> Tensor:
            utterances, heads, _ = block.part
            weights = block.weights
            mass = weights @ masks[utterances]
            values = by_type[utterances, heads]
            outputs = weights @ values.flatten(3)
            outputs = outputs.unflatten(3, by_type.shape[3:])
            weighted = weights @ lengths[utterances, heads]
            if attention.has_sink:
                # The sink is the last type of key, with the rest of the weight and no value.
                left = 1 - mass.sum(-1, keepdim=True)
                mass = torch.cat([mass, left], -1)
                outputs = functional.pad(outputs, (0, 0, 0, 1))
                weighted = functional.pad(weighted, (0, 1))
            rest = outputs.sum(3, keepdim=True) - outputs
            norms = [torch.linalg.vector_norm(part, dim=-1) for part in (outputs, rest)]
            of_rows = torch.stack([mass, *norms, weighted], -1)
            counted = block.of_queries(attention.counted)
            of_counted = of_rows * counted[..., None, None]
            return of_counted.sum(2)

        queries = attention.visibility.queries
        self.add(("sums", layer), attention.reduce(added), activations)
        self.add(("queries", layer), queries.counts, activations)
        self.add(("pairs", layer), attention.pairs, activations)

    def rows(self, sums: LayerSums) -> Columns:
        occur = sums.whole["pairs"] > 0
        of_types = sums["sums"][:, :, occur]
        means = of_types / sums["queries"][:, None, None, None]
        weighted = of_types[..., 3]
        types = (*self.types, "sink")[: len(occur)]
        return {
            "key_type": np.array(types)[occur],
            "mass": means[..., 0],
            "added_norm": means[..., 1],
            "rest_norm": means[..., 2],
            "weighted_norm": means[..., 3],
            "share": means_of(weighted, weighted.sum(-1, keepdims=True)),
        }
