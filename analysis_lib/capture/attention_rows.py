"""Attention with the entropy of its rows and their weight per type of key, without keeping the weights."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from analysis_lib.capture.tokens import Tokens, Visibility

# How many scores are formed at once: as many as the cache of a processor holds, or a small part of a GPU's memory.
SCORES_AT_ONCE, SCORES_AT_ONCE_ON_GPU = 2**19, 2**24
# How many rows of causal attention are formed at once on a processor: no key after the last of them is.
CAUSAL_ROWS = 64


@dataclass(eq=False)
class Received:
    """The attention that each key receives from the counted queries that see it.

    Attributes:
        weights: their sum; 0 at padding.
        queries: how many these are.
        keys: the tokens of the keys.
    """

    weights: Float[Tensor, "utterance head key"]
    queries: Float[Tensor, "utterance #key"]
    keys: Tokens

    @classmethod
    def nothing(cls, heads: int, visibility: Visibility, like: Tensor) -> "Received":
        """To which weights are to be added."""
        keys, counted = visibility.keys, visibility.queries.counted.double()
        weights = torch.zeros(len(keys.mask), heads, keys.mask.shape[1], dtype=like.dtype, device=like.device)
        return cls(weights, visibility.over_queries(counted.unsqueeze(-1)).squeeze(-1), keys)


@dataclass(eq=False)
class AttentionRows:
    """Summary of the attention weights of a layer.

    Attributes:
        entropy: −Σ p ln p of each row, in nats, in [0, ln keys].
        type_mass: the weight given to the keys of each type, summed over the counted queries of an utterance.
        keys: how many keys each query may see.
        pairs: how many pairs of a counted query and a visible key there are, by the type of the key.
        uniform: what ``type_mass`` is where attention is spread evenly over the keys that a query may see.
        received: what each key receives, if a metric asked for it.

    A learnt sink, a logit beside the scores that takes weight and gives no value, is a last type, and a key of each
    query.
    """

    entropy: Float[Tensor, "utterance head token"]
    type_mass: Float[Tensor, "utterance head type"]
    keys: Float[Tensor, "utterance token"]
    pairs: Float[Tensor, "utterance type"]
    uniform: Float[Tensor, "utterance type"]
    received: Received | None = None


def attend_with_rows(
    query: Float[Tensor, "utterance head token head_dim"],
    key: Float[Tensor, "utterance head key head_dim"],
    value: Float[Tensor, "utterance head key value_dim"],
    mask: Bool[Tensor, "#utterance #head #token key"] | None,
    scaling: float,
    type_masks: Float[Tensor, "utterance type key"],
    counted: Bool[Tensor, "utterance token"],
    bias: Float[Tensor, "#utterance #head #token key"] | None = None,
    causal: bool = False,
    softcap: float | None = None,
    sinks: Float[Tensor, " head"] | None = None,
    received: Float[Tensor, "utterance head key"] | None = None,
) -> tuple[
    Float[Tensor, "utterance head token value_dim"],
    Float[Tensor, "utterance head token"],
    Float[Tensor, "utterance head kind"],
]:
    """The output of attention, the entropy of its rows, and the weight given to each type of key.

    With scores s = scaling · q·k + bias and weights p = softmax(s), the entropy of a row is −Σ p ln p, in nats, in
    [0, ln keys]. With e = exp(s − max s) and Z = Σ e, weights are e / Z and the entropy is ln Z − Σ e (s − max s) / Z:
    no logarithm of every weight is taken. One product of e with the values [v, type indicators] gives the output and
    the weight of each type, which are then divided by Z. Weights are summed over the counted queries of an utterance. A
    few rows are formed at a time, and none is kept.

    With a sink of logit s₀, all weights shrink by a = 1 / (1 + exp(s₀ − log Σ exp s)), the sink has 1 − a, and the
    entropy is that of the row times a, and −a ln a − (1 − a) ln(1 − a) more.

    Args:
        mask: True where a query may see a key, one at least; None if every query sees every key.
        type_masks: 1 where a key has a type, else 0.
        counted: True at the queries whose weights are summed.
        bias: added to the scores after scaling.
        causal: whether no query sees a key after it, as the mask says.
        softcap: c, where scaled scores are capped to c tanh(s / c) before anything is added.
        sinks: a logit of each head.
        received: the weights that each key receives from counted queries are added to it.

    Returns:
        The output; the entropy of each row; the weight by utterance, head and type, the sink last.
    """
    utterances, heads, tokens, _ = query.shape
    keys, width = value.shape[2:]
    indicators = type_masks.transpose(1, 2).unsqueeze(1).expand(-1, heads, -1, -1)
    values = torch.cat([value, indicators], -1)
    added = added_to_scores(mask, bias, query.dtype)
    added = None if added is None else added.expand(utterances, heads, tokens, keys)
    mixed, entropy = query.new_empty(*query.shape[:3], values.shape[-1]), query.new_empty(query.shape[:3])
    kept = None if sinks is None else query.new_empty(query.shape[:3])
    for part in _parts(query, keys, causal):
        end = min(part[2].stop, keys) if causal else keys
        of_keys = (*part[:2], slice(end))
        scores = (query[part] @ key[of_keys].transpose(2, 3)).mul_(scaling)
        if softcap is not None:
            scores = scores.div_(softcap).tanh_().mul_(softcap)
        if added is not None:
            scores += added[part][..., :end]
        largest = scores.amax(-1, keepdim=True)
        # Not softmax, which takes several times as long over rows of fewer than sixteen keys.
        weights = scores.sub_(largest).exp()
        total = weights.sum(-1, keepdim=True)
        mixed[part] = (weights @ values[of_keys]).div_(total)
        if sinks is not None:
            kept[part] = torch.sigmoid((total.log() + largest).squeeze(-1) - sinks[part[1], None])
        if received is not None:
            given = counted[part[0], part[2]].to(weights.dtype).unsqueeze(1)
            given = (given if kept is None else given * kept[part]) / total.squeeze(-1)
            received[of_keys] += (given.unsqueeze(2) @ weights).squeeze(2)
        entropy[part] = total.log().squeeze(-1) - scores.mul_(weights).sum(-1) / total.squeeze(-1)
    if sinks is not None:
        lost = 1 - kept
        entropy = kept * entropy + torch.special.entr(kept) + torch.special.entr(lost)
        mixed = torch.cat([mixed * kept.unsqueeze(-1), lost.unsqueeze(-1)], -1)
    output, mass = mixed.split([width, mixed.shape[-1] - width], -1)
    queries = counted.to(mass.dtype)[:, None, None]
    return output, entropy.clamp_min(0), (queries @ mass).squeeze(2)


def _parts(query: Tensor, keys: int, causal: bool) -> Iterator[tuple[slice, slice, slice]]:
    """Utterances, heads and tokens that are taken at once: several utterances, or heads of one, or rows of a head."""
    on_cpu = query.device.type == "cpu"
    room = SCORES_AT_ONCE if on_cpu else SCORES_AT_ONCE_ON_GPU
    most = [room // (query.shape[1] * query.shape[2] * keys), room // (query.shape[2] * keys), room // keys]
    if causal and on_cpu:
        most[2] = min(most[2], CAUSAL_ROWS)
    sizes = [max(1, min(count, size)) for count, size in zip(query.shape[:3], most, strict=True)]
    starts = [range(0, count, size) for count, size in zip(query.shape[:3], sizes, strict=True)]
    for start in itertools.product(*starts):
        yield tuple(slice(first, first + size) for first, size in zip(start, sizes, strict=True))


def added_to_scores(mask: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Bias and mask as one: where a key is not seen, a number so low that its weight is 0, but finite."""
    if mask is None:
        return bias
    lowest = torch.finfo(dtype).min / 2
    return torch.where(mask, torch.zeros((), dtype=dtype, device=mask.device) if bias is None else bias, lowest)
