"""Sums of attention scores: the contribution C_j of each dimension, and the other terms."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from analysis_lib.capture.long_sums import weighted_sums
from analysis_lib.capture.tokens import Bin, Tokens, Visibility
from analysis_lib.capture.vectors import Vectors

BackThroughKey = Callable[
    [Float[Tensor, "utterance head #key head_dim"]], Float[Tensor, "utterance head key made"]
]
# A function of the tokens of the queries, see ``ScoreSums.position_query``.
PositionQuery = Callable[[Tokens], Float[Tensor, "utterance head key made"]]


@dataclass(eq=False)
class ScoreSums:
    r"""Scores q·k of a layer before scaling, summed over pairs of a query and a key that it sees.

    A key is k_n = T_n (W_K x_n + b_K), where x_n is the attention input and T_n stands for the
    steps after the projection: the identity in BERT; a rotation by the key's position in rotary
    models, preceded by the division by its norm where keys are normalised; in latent attention, a
    second projection. A score is thus linear in x_n,

        q_m · k_n = (T_nᵀ q_m) · (W_K x_n + b_K),

    and the contribution of dimension j of x_n to it is (Maruta and Matsuzaki 2024, eq. 7)

        C_j = (T_nᵀ q_m) · (W_K)_j x_nj, with (W_K)_j the column j of W_K.

    T_n does not depend on the query, so no pair needs to be formed. With g_n = T_nᵀ Σ_m q_m,

        Σ_m Σ_n C_j = Σ_n (W_Kᵀ g_n)_j x_nj.

    Where g_n is the same for all keys of an utterance, Σ_n x_n suffices. Sums over the utterances
    of a run (at most one batch) and over tokens are in the model's precision, a thousand tokens at
    a time.

    The norm of a normalised key is treated as a constant, so that the C_j add up to the score minus
    the part of b_K. DeBERTa's position-to-content scores depend on x_n as well: r_mn is added to
    T_nᵀ q_m there.

    Attributes:
        query: q, after bias, rotation and normalisation.
        inputs: x_n, as vectors with one head.
        weight: W_K of each head. Its output has the size of a key, except in latent attention;
            grouped heads share theirs.
        bias: b_K of each head, or None.
        visibility: which queries see which keys.
        back: a function that applies T_nᵀ to one vector per key; None for the identity.
        position: the term added to the score of each pair that does not depend on the key's input:
            a relative position bias, or DeBERTa's content-to-position score.
        position_query: a function of the queries' tokens that gives, for each key, Σ_m r_mn over
            the counted queries m that see it, where r_mn · (W_K x_n) is added to the score:
            DeBERTa's position-to-content score.
        offset: T_n applied to b_K if T_n is affine, as with a LayerNorm of keys; ``bias`` is None
            then.
    """

    query: Float[Tensor, "utterance head token head_dim"]
    inputs: Vectors
    weight: Float[Tensor, "head made width"]
    bias: Float[Tensor, "head made"] | None
    visibility: Visibility
    back: BackThroughKey | None = None
    position: Float[Tensor, "#utterance head token key"] | None = None
    position_query: PositionQuery | None = None
    offset: Float[Tensor, "utterance head key head_dim"] | None = None

    def of_bin(self, bin: Bin) -> "ScoreSums":
        """The same scores, where only queries in a bin count."""
        return replace(self, visibility=self.visibility.of_bin(bin))

    @cached_property
    def by_distance(self) -> Float[Tensor, "utterance head key made"] | None:
        """For each key, Σ_m r_mn over the counted queries m that see it; None without such a term.

        See ``position_query``.
        """
        if self.position_query is None:
            return None
        return self.position_query(self.visibility.queries)

    @cached_property
    def _asked(self) -> Float[Tensor, "utterance head #key head_dim"]:
        """Σ_m q_m over the counted queries m that see key n."""
        return self.visibility.over_queries(
            self.query * self.visibility.queries.counted[:, None, :, None]
        )

    @cached_property
    def gradient(self) -> Float[Tensor, "utterance head #key made"]:
        """∂(Σ scores)/∂(W_K x_n + b_K), the gradient of the summed scores.

        It is Σ_m (T_nᵀ q_m + r_mn) over the counted queries m that see key n.

        The key axis has length 1 if the sum is the same for all keys.
        """
        gradient = self._asked if self.back is None else self.back(self._asked)
        return gradient if self.by_distance is None else gradient + self.by_distance

    @cached_property
    def contributions(self) -> Float[Tensor, "run head kind width"]:
        """Σ C_j over pairs, by each type of key that occurs."""
        tokens = self.visibility.keys
        if self.gradient.shape[2] == 1:
            # Every key of an utterance meets the same gradient, so the sums of the inputs suffice.
            gradient = torch.einsum("bhne,hed->bhnd", self.gradient, self.weight)
            return tokens.by_run(gradient * self.inputs.kind_sums)
        # Head by head: the C_j of all heads and keys at once would multiply the memory of the
        # inputs by the number of heads.
        inputs = self.inputs.values.flatten(0, 2)
        by_head = zip(self.gradient.unbind(1), self.weight, strict=True)
        parts = [
            tokens.in_bags((part.flatten(0, 1) @ weight).mul_(inputs)) for part, weight in by_head
        ]
        return torch.stack(parts, 1)

    @cached_property
    def terms(self) -> dict[str, Float[Tensor, "run head type"]]:
        """Σ over pairs of each term of the scores, by the type of the key.

        The terms, as listed in ``metrics.ScoreTerms``, add up to the sum of the scores.
        """
        content = self.contributions.sum(-1, dtype=torch.float64, keepdim=True)
        terms = {"content": self.visibility.keys.of_types(content).squeeze(-1)}
        if self.by_distance is not None:
            projected = torch.einsum("hed,bnd->bhne", self.weight, self.inputs.values.squeeze(1))
            by_key = (self.by_distance * projected).sum(-1, keepdim=True)
            terms["position_query"] = self.by_type(by_key).squeeze(-1)
            terms["content"] = terms["content"] - terms["position_query"]
        if self.bias is not None or self.offset is not None:
            added = (
                self.gradient * self.bias.unsqueeze(1)
                if self.offset is None
                else self._asked * self.offset
            )
            by_key = added.sum(-1, keepdim=True)
            by_key = by_key.expand(-1, -1, self.inputs.values.shape[2], -1)
            terms["key_bias"] = self.by_type(by_key).squeeze(-1)
        if self.position is not None:
            terms["position"] = self.by_type(self._position_sums()).squeeze(-1)
        return terms

    def _position_sums(self) -> Float[Tensor, "utterance head key 1"]:
        seen = self.visibility.queries.counted[:, :, None].to(self.position.dtype)
        if self.visibility.causal:
            keys = self.position.shape[-1]
            seen = seen * torch.ones(keys, keys, dtype=seen.dtype, device=seen.device).tril()
        elif self.visibility.seen_by is not None:
            seen = seen * self.visibility.seen_by.squeeze(1)
        return (self.position * seen.unsqueeze(1)).sum(2).unsqueeze(-1)

    def by_type(
        self, values: Float[Tensor, "utterance head #key dim"]
    ) -> Float[Tensor, "run head type dim"]:
        """Values of the keys, summed by run and by type of key."""
        keys = self.visibility.keys
        masks = keys.type_masks.to(values.dtype)
        return keys.by_run(weighted_sums(masks.unsqueeze(1), values))
