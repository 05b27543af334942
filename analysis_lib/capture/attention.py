"""What passes through attention: its rows without keeping them, and what its scores are made of."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from analysis_lib.capture.inputs import Tokens
from analysis_lib.capture.vectors import Vectors

# Rows of attention longer than this go through the fused kernel, shorter ones are formed (benchmarks/).
LONGEST_FORMED_ROW = 96
# Where only formed rows are at hand, so many of their elements are held at once.
FORMED_ELEMENTS = 2**24


# --- Attention rows without keeping the weights ---------------------------------------------------


@dataclass(eq=False)
class AttentionRows:
    """What is known of the attention weights of a layer without keeping them.

    Attributes:
        entropy: of each row, in nats.
        type_mass: the weight that each utterance's counted queries together give to the keys of each type.
        keys: how many keys each row may see.
        pairs: how many pairs of a counted query and a key that it sees there are, by the type of the key.
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
    """The output of attention, the entropy of its rows, and the weight that goes to each type of key.

    With scores s = scaling · q·k + bias and weights p = softmax(s), the entropy of a row is −Σ p ln p, in nats and in
    [0, ln of the number of keys]. The weight is summed over the counted queries of an utterance. Short rows are
    formed. Long ones are not: their entropy is ln Σ exp s − Σ p s, where Σ p s = scaling · q·(Σ p k) but for the bias,
    and one fused call with the values [v, k, type indicators] gives the output, Σ p k and the weight per type at
    once. Rows with a bias are formed, whatever their length: Σ p · bias needs each weight.
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


# --- Who sees whom --------------------------------------------------------------------------------


@dataclass(eq=False)
class Visibility:
    """Which keys a query may see, besides padding, which none may.

    Attributes:
        queries: the tokens of the queries.
        keys: the tokens of the keys.
        causal: whether query m sees the keys up to m.
        seen_by: where it is neither all nor causal, 1 where a query sees a key.
    """

    queries: Tokens
    keys: Tokens
    causal: bool = False
    seen_by: Float[Tensor, "utterance token key"] | None = None

    @property
    def everyone(self) -> bool:
        """Whether every query sees every key."""
        return not self.causal and self.seen_by is None

    def over_queries(self, values: Float[Tensor, "*batch token dim"]) -> Float[Tensor, "*batch key dim"]:
        """Σ over the queries that see a key, of a value per query, for each key: the axis is 1 long if all see all.

        Causal attention needs no pairs: the sum over the queries m ≥ n is a sum from the end.
        """
        if self.everyone:
            return values.sum(-2, keepdim=True)
        if self.causal:
            return values.flip(-2).cumsum(-2).flip(-2)
        seen_by = self.seen_by.to(values.dtype).transpose(-1, -2)
        return (seen_by.unsqueeze(1) if values.dim() == 4 else seen_by) @ values

    @cached_property
    def seen(self) -> Float[Tensor, "utterance token"]:
        """How many keys each query sees."""
        real = self.keys.mask.double()
        if self.everyone:
            return real.sum(1, keepdim=True).expand(-1, self.queries.mask.shape[1])
        if self.causal:
            return real.cumsum(1)
        return (self.seen_by.double() @ real.unsqueeze(-1)).squeeze(-1)

    @cached_property
    def pairs(self) -> Float[Tensor, "utterance type"]:
        """How many pairs of a counted query and a key that it sees there are, by the type of the key."""
        counted = self.queries.counted.double().unsqueeze(-1)
        queries_of_key = self.over_queries(counted).squeeze(-1).expand(-1, self.keys.mask.shape[1])
        return (self.keys.type_masks.double() @ queries_of_key.unsqueeze(-1)).squeeze(-1)


# --- What scores are made of ----------------------------------------------------------------------

BackThroughKey = Callable[[Float[Tensor, "utterance head #key head_dim"]], Float[Tensor, "utterance head key head_dim"]]


@dataclass(eq=False)
class Scores:
    r"""The scores of a layer, q·k and what is added to it, before scaling, as sums over pairs need them.

    Keys are k_n = T_n (W_K x_n + b_K): x_n is the attention input, and T_n, the identity in BERT, is what happens to a
    key after its projection: a rotation by its position (rotary models), before that the division by its norm
    (normalised keys). A score q_m · k_n = (T_nᵀ q_m) · (W_K x_n + b_K) is thus a sum over the dimensions of x_n; since
    T_n does not depend on the query, it may be applied to the sum over queries. The norm of a normalised key is
    taken as it is: the score is then linear in x_n, and exactly the sum of its parts.

    Attributes:
        query: q, after rotation and normalisation.
        inputs: x_n, as the vectors of one head.
        weight: W_K of each head; grouped heads share theirs.
        bias: b_K of each head, or None.
        visibility: who sees whom.
        back: T_nᵀ of vectors at every key; None for the identity.
        position: the part of each score that neither content has a share in, or the query's alone: a bias.
        position_query: Σ over queries, for each key, of the vectors that stand for positions and meet the key's
            content, as DeBERTa's do.
    """

    query: Float[Tensor, "utterance head token head_dim"]
    inputs: Vectors
    weight: Float[Tensor, "head head_dim width"]
    bias: Float[Tensor, "head head_dim"] | None
    visibility: Visibility
    back: BackThroughKey | None = None
    position: Float[Tensor, "#utterance head token key"] | None = None
    position_query: Float[Tensor, "utterance head key head_dim"] | None = None

    @cached_property
    def content_gradient(self) -> Float[Tensor, "utterance head #key head_dim"]:
        """Σ_m T_nᵀ q_m over the counted queries that see key n; one for all keys where it is the same for all."""
        counted = self.visibility.queries.counted[:, None, :, None]
        gradient = self.visibility.over_queries(self.query * counted)
        return gradient if self.back is None else self.back(gradient)

    @cached_property
    def gradient(self) -> Float[Tensor, "utterance head #key head_dim"]:
        """The derivative of the sum of scores by each projected key W_K x_n + b_K."""
        if self.position_query is None:
            return self.content_gradient
        return self.content_gradient + self.position_query

    @cached_property
    def contributions(self) -> Float[Tensor, "utterance head type width"]:
        """Σ C_j over pairs, by the type of the key: the part of the scores that each dimension of x_n adds."""
        gradient = torch.einsum("bhne,hed->bhnd", self.gradient, self.weight)
        if self.visibility.everyone and gradient.shape[2] == 1:
            # Every key meets the same gradient: the sum of the inputs is enough.
            return gradient * self.inputs.type_sums
        return self._by_type(gradient.mul_(self.inputs.values))

    @cached_property
    def terms(self) -> dict[str, Float[Tensor, "utterance head type"]]:
        """Σ over pairs of each term of the score, by the type of the key; they add up to the sum of the scores."""
        terms = {"content": self.contributions.sum(-1)}
        if self.position_query is not None:
            projected = torch.einsum("hed,bnd->bhne", self.weight, self.inputs.values.squeeze(1))
            by_key = (self.position_query * projected).sum(-1, keepdim=True)
            terms["position_query"] = self._by_type(by_key).squeeze(-1)
            terms["content"] = terms["content"] - terms["position_query"]
        if self.bias is not None:
            by_key = (self.gradient * self.bias.unsqueeze(1)).sum(-1, keepdim=True)
            by_key = by_key.expand(-1, -1, self.inputs.values.shape[2], -1)
            terms["key_bias"] = self._by_type(by_key).squeeze(-1)
        if self.position is not None:
            terms["position"] = self._by_type(self._position_sums()).squeeze(-1)
        return terms

    def _position_sums(self) -> Float[Tensor, "utterance head key 1"]:
        seen = self.visibility.queries.counted[:, :, None].to(self.position.dtype)
        if self.visibility.causal:
            keys = self.position.shape[-1]
            seen = seen * torch.ones(keys, keys, dtype=seen.dtype, device=seen.device).tril()
        elif self.visibility.seen_by is not None:
            seen = seen * self.visibility.seen_by
        return (self.position * seen.unsqueeze(1)).sum(2).unsqueeze(-1)

    def _by_type(self, values: Float[Tensor, "utterance head key dim"]) -> Float[Tensor, "utterance head type dim"]:
        return self.visibility.keys.type_masks.to(values.dtype).unsqueeze(1) @ values
