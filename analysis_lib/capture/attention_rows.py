"""Attention with the entropy of its rows and their weight per type of key, without keeping the weights."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

# Longer rows go through the fused kernel, shorter ones are formed: each is faster there.
LONGEST_FORMED_ROW = 96
# How many elements of formed rows are held at once.
FORMED_ELEMENTS = 2**24


@dataclass(eq=False)
class AttentionRows:
    """Summary of the attention weights of a layer.

    Attributes:
        entropy: −Σ p ln p of each row, in nats, in [0, ln keys].
        type_mass: the weight given to the keys of each type, summed over the counted queries of an utterance.
        keys: how many keys each query may see.
        pairs: how many pairs of a counted query and a visible key there are, by the type of the key.
    """

    entropy: Float[Tensor, "utterance head token"]
    type_mass: Float[Tensor, "utterance head type"]
    keys: Float[Tensor, "utterance token"]
    pairs: Float[Tensor, "utterance type"]


def attend_with_rows(
    query: Float[Tensor, "utterance head token head_dim"],
    key: Float[Tensor, "utterance head key head_dim"],
    value: Float[Tensor, "utterance head key value_dim"],
    mask: Bool[Tensor, "#utterance #head #token key"] | None,
    scaling: float,
    type_masks: Float[Tensor, "utterance type key"],
    counted: Bool[Tensor, "utterance token"],
    bias: Float[Tensor, "#utterance #head #token key"] | None = None,
) -> tuple[
    Float[Tensor, "utterance head token value_dim"],
    Float[Tensor, "utterance head token"],
    Float[Tensor, "utterance head type"],
]:
    """The output of attention, the entropy of its rows, and the weight given to each type of key.

    With scores s = scaling · q·k + bias and weights p = softmax(s), the entropy of a row is −Σ p ln p, in nats, in
    [0, ln keys]. Weights are summed over the counted queries of an utterance.

    Short rows are formed. Long rows without a bias are not: as Σ p s = scaling · q·(Σ p k), their entropy is
    ln Σ exp s − scaling · q·(Σ p k), and one fused call with the values [v, k, type indicators] gives the output,
    Σ p k and the weight of each type. With a bias, Σ p · bias needs every weight, so these rows are always formed.

    Args:
        mask: True where a query may see a key; None if every query sees every key.
        type_masks: 1 where a key has a type, else 0.
        counted: True at the queries whose weights are summed.
        bias: added to the scores after scaling.

    Returns:
        The output; the entropy of each row; the weight by utterance, head and type.
    """
    fused = query.shape[2] > LONGEST_FORMED_ROW and query.device.type == "cpu" and bias is None
    if fused and query.shape[-1] == value.shape[-1]:
        output, entropy, mass = _fused_rows(query, key, value, mask, scaling, type_masks)
    else:
        output, entropy, mass = _formed_rows(query, key, value, mask, scaling, type_masks, bias)
    queries = counted.to(mass.dtype)[:, None, None]
    return output, entropy, (queries @ mass).squeeze(2)


def _formed_rows(query, key, value, mask, scaling, type_masks, bias=None) -> tuple[Tensor, Tensor, Tensor]:
    utterances, heads, tokens, _ = query.shape
    chunk = max(1, FORMED_ELEMENTS // (utterances * heads * key.shape[2]))
    keys, indicators = key.transpose(2, 3), type_masks.transpose(1, 2).unsqueeze(1)
    parts = []
    for start in range(0, tokens, chunk):
        scores = (query[:, :, start : start + chunk] * scaling) @ keys
        if bias is not None:
            scores += bias.expand(-1, -1, tokens, -1)[:, :, start : start + chunk]
        if mask is not None:
            allowed = mask.expand(-1, -1, tokens, -1)[:, :, start : start + chunk]
            scores.masked_fill_(~allowed, -math.inf)
        weights = scores.softmax(-1)
        parts.append((weights @ value, torch.special.entr(weights).sum(-1), weights @ indicators))
    return tuple(torch.cat(part, 2) if len(part) > 1 else part[0] for part in zip(*parts, strict=True))


def _fused_rows(query, key, value, mask, scaling, type_masks) -> tuple[Tensor, Tensor, Tensor]:
    heads, head_dim, types = query.shape[1], query.shape[3], type_masks.shape[1]
    indicators = type_masks.transpose(1, 2).unsqueeze(1).expand(-1, heads, -1, -1)
    values = torch.cat([value, key, indicators], -1)
    # The kernel wants queries, keys and values of one width; zeros add nothing to a score.
    padding = (0, values.shape[-1] - head_dim)
    bias = None
    if mask is not None:
        bias = torch.zeros(mask.shape, dtype=query.dtype).masked_fill_(~mask, -math.inf)
    # The public function keeps the log-sum-exp of the rows to itself; this is what it calls on a CPU.
    mixed, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        functional.pad(query, padding),
        functional.pad(key, padding),
        values,
        0.0,
        False,
        attn_mask=bias,
        scale=scaling,
    )
    output, keys, mass = mixed.split([head_dim, head_dim, types], -1)
    entropy = log_sum - scaling * (query * keys).sum(-1)
    return output, entropy.clamp_min(0), mass
