"""DeBERTa's disentangled attention: the scores between contents and relative positions (He et al. 2021).

Its queries, keys, values and attention weights are reached by hooks (``hooked.py``).
"""

from jaxtyping import Float
from torch import Tensor, nn

from analysis_lib.capture.tokens import Tokens


def disentangled_terms(
    module: nn.Module,
    arguments: dict[str, object],
    query: Float[Tensor, "utterance head token head_dim"],
    tokens: Tokens,
) -> tuple[Float[Tensor, "utterance head token token"] | None, Float[Tensor, "utterance head token head_dim"] | None]:
    """What relative positions add to the scores q_m · k_n, before scaling; None for a term that the model lacks.

    Args:
        module: the attention module of DeBERTa or DeBERTa-v2.
        arguments: of its call, by name.

    Returns:
        The content-to-position score of each pair, q_m · r^K(m − n); and for each key n, Σ_m r^Q(n − m) over the
        counted queries m: the position-to-content score of a pair is r^Q(n − m) · k_n.
    """
    count, relative = query.shape[2], arguments["relative_pos"]
    embeddings = arguments["rel_embeddings"]
    if hasattr(module, "pos_ebd_size"):
        span = module.pos_ebd_size
        embeddings = embeddings[: 2 * span]
        names = ("key_proj", "query_proj") if module.share_att_key else ("pos_key_proj", "pos_query_proj")
    else:
        span = min(count, module.max_relative_positions)
        embeddings = embeddings[module.max_relative_positions - span : module.max_relative_positions + span]
        names = ("pos_proj", "pos_q_proj")
    relative = relative.reshape(-1, count, count)[0].long()
    heads = query.shape[1]
    # Each of shape head x distance x head_dim, for 2 span distances.
    by_distance = {
        kind: getattr(module, name)(embeddings).unflatten(-1, (heads, -1)).transpose(0, 1)
        for kind, name in zip(("c2p", "p2c"), names, strict=True)
        if kind in module.pos_att_type
    }
    position = position_query = None
    if "c2p" in by_distance:
        index = (relative + span).clamp(0, 2 * span - 1)
        position = (query @ by_distance["c2p"].transpose(1, 2)).gather(-1, index.expand(*query.shape[:2], -1, -1))
    if "p2c" in by_distance:
        # Row n holds the distance at which each query m meets key n: it is enough to count how often each occurs.
        index = (-relative + span).clamp(0, 2 * span - 1).expand(len(query), -1, -1)
        occurs = query.new_zeros(len(query), count, 2 * span)
        occurs.scatter_add_(2, index, tokens.counted.to(query.dtype).unsqueeze(1).expand(-1, count, -1))
        position_query = occurs.unsqueeze(1) @ by_distance["p2c"]
    return position, position_query
