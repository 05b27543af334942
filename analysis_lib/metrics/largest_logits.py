"""Largest attention logits of each head, by the types of the tokens that they stand between."""

import numpy as np
import torch
from torch import Tensor

from analysis_lib.capture import LOGITS, Activations, Logits, Visibility
from analysis_lib.capture.attention_rows import lowest_score
from analysis_lib.metrics.accumulator import Columns, LayerSums, Metric
from analysis_lib.metrics.sums import Maxima

# The value of pairs that do not occur: below every logit, and finite, so that sums of it are, too.
NONE = -1e300


class LargestLogits(Metric):
    """Largest attention logit of each head, between each two types of tokens.

    A logit is a score as it enters the softmax: scaled, capped where the model caps it, with its
    bias. Logits that grow without bound during training are a sign of instability; MuonClip
    rescales the queries and keys of heads whose largest logit passes a threshold (Kimi Team 2025,
    sec. 2.1).

    Columns: layer, head, query_type and key_type (types of tokens), and logit, the largest over all
    pairs of a query that counts and a key that it sees. Two types that never meet have no row. A
    maximum depends on a single pair, and has no interval. Made on request.
    """

    name = "largest_logits"
    needs = frozenset({LOGITS})
    axes = ("head", "query_type")
    order = ("layer", "head", "query_type", "key_type")
    on_request = True
    state = Maxima
    reason_for_none = "no layer shows the scores of its attention: leave it out"

    def update(self, activations: Activations) -> None:
        attention = activations.attention
        if attention is None or attention.logits is None:
            return
        for logits in attention.logits():
            _, heads, _ = logits.part
            largest = _largest(logits, attention.visibility)
            utterances, _, *types = largest.shape
            every = largest.new_full((utterances, attention.heads, *types), NONE)
            every[:, heads] = largest
            self.add(("logit", activations.layer), every, activations)

    def rows(self, sums: LayerSums) -> Columns:
        logits = sums["logit"]
        query_types, key_types = np.nonzero((logits > NONE).any((0, 1)))
        types = np.array(self.types)
        return {
            "query_type": types[query_types],
            "key_type": types[key_types],
            "logit": logits[:, :, query_types, key_types],
        }


def _largest(logits: Logits, visibility: Visibility) -> Tensor:
    """The largest logit by type of query and type of key, utterance x head x type x type."""
    utterances, _, queries = logits.part
    scores = logits.scores.double()
    key_types = visibility.keys.types[utterances, logits.keys]
    types = len(visibility.keys.type_names)
    by_key = scores.new_full((*scores.shape[:-1], types), NONE)
    key_types = key_types[:, None, None].expand_as(scores)
    by_key = by_key.scatter_reduce(-1, key_types, scores, "amax")
    is_hidden = by_key <= lowest_score(logits.scores.dtype)
    counted = visibility.queries.counted[utterances, queries]
    by_key = torch.where(is_hidden | ~counted[:, None, :, None], NONE, by_key)
    query_types = visibility.queries.types[utterances, queries]
    query_types = query_types[:, None, :, None].expand_as(by_key)
    by_type = by_key.new_full((*by_key.shape[:2], types, types), NONE)
    return by_type.scatter_reduce(2, query_types, by_key, "amax")
