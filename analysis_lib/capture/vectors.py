"""The vectors of one space in one layer of a batch."""

from collections.abc import Sequence
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from analysis_lib.capture.long_sums import weighted_sums
from analysis_lib.capture.tokens import Bin, Tokens


def wide(values: Tensor) -> Tensor:
    """The values in at least single precision, since sums in half precision lose most digits."""
    return values.float() if values.dtype in (torch.bfloat16, torch.float16) else values


# Range of norms in which single precision can hold the squares of all components, and their sum.
SMALLEST_NORM, LARGEST_NORM = 1e-15, 1e18
# What a vector can be: that of each token, or one for each utterance, see ``Vectors.of_texts``.
VECTORS_OF = ("token", "first", "last", "mean")


class Vectors:
    """Vectors of one space in one layer of a batch, and the sums over tokens that metrics share.

    Each sum is computed once, on first use. Sums over the tokens of one utterance are in the
    model's precision, or in single precision if that is half, a thousand tokens at a time; metrics
    add up utterances in float64.

    Attributes:
        values: the vectors; hidden vectors have one head.
        tokens: the tokens of the vectors.
    """

    def __init__(self, values: Float[Tensor, "utterance head token dim"], tokens: Tokens):
        self.values = values
        self.tokens = tokens
        # Vectors of several layers and spaces, and which of their heads these are.
        self._joined: tuple[Vectors, slice] | None = None
        # Vectors with the same values, whose norms are computed once.
        self._whole: Vectors | None = None
        self._of_texts: dict[str, Vectors] = {}

    @staticmethod
    def join(several: "Sequence[Vectors]") -> None:
        """Let vectors of the same tokens and of the same width compute their sums together."""
        if len(several) < 2:
            return
        every = Vectors(torch.cat([vectors.values for vectors in several], 1), several[0].tokens)
        start = 0
        for vectors in several:
            heads = slice(start, start + vectors.values.shape[1])
            vectors.values = every.values[:, heads]
            vectors._joined = every, heads
            start = heads.stop

    def of_texts(self, vectors_of: str) -> "Vectors":
        """One vector for each utterance, as the vectors of a single token.

        Args:
            vectors_of: ``first`` or ``last`` for the vector of that token, ``mean`` for the mean
                vector, each of the tokens that count; ``token`` for these vectors as they are.
        """
        if vectors_of == "token":
            return self
        if vectors_of not in self._of_texts:
            values = self._of_utterances(vectors_of).unsqueeze(2)
            self._of_texts[vectors_of] = Vectors(values, self.tokens.of_texts(vectors_of))
        return self._of_texts[vectors_of]

    def of_bin(self, bin: Bin) -> "Vectors":
        """The same vectors, where only those of tokens in a bin count."""
        of_bin = Vectors(self.values, self.tokens.of_bin(bin))
        of_bin._whole = self
        return of_bin

    def _of_utterances(self, vectors_of: str) -> Float[Tensor, "utterance head dim"]:
        if vectors_of == "mean":
            counts = self.counts.clamp_min(1).to(self.values.dtype)
            return self.sum / counts[:, None, None]
        chosen = self.tokens.chosen(vectors_of)
        utterances = torch.arange(len(chosen), device=chosen.device)
        return self.values[utterances, :, chosen]

    @property
    def counts(self) -> Float[Tensor, " utterance"]:
        """Number of vectors of each utterance that count."""
        return self.tokens.counts

    @cached_property
    def norms(self) -> Float[Tensor, "utterance head token"]:
        """‖x‖₂ of every vector, 0 where the token does not count."""
        return self.every_norm * self.tokens.counted.unsqueeze(1)

    @cached_property
    def every_norm(self) -> Float[Tensor, "utterance head token"]:
        """‖x‖₂ of every vector, also where the token does not count."""
        if self._whole is not None:
            return self._whole.every_norm
        if self._joined is not None:
            every, heads = self._joined
            return every.every_norm[:, heads]
        if self._is_out_of_scale:
            norms = torch.linalg.vector_norm(self.values, dim=-1, dtype=torch.float64)
            return norms.to(self.values.dtype)
        return self._plain_norms

    @cached_property
    def _plain_norms(self) -> Float[Tensor, "utterance head token"]:
        return torch.linalg.vector_norm(self.values, dim=-1)

    @cached_property
    def _is_out_of_scale(self) -> bool:
        """Whether double precision is needed because single precision cannot hold all squares."""
        if self.values.dtype == torch.float64 or self.values.device.type != "cpu":
            # On a GPU, looking at the norms would need a synchronisation.
            return self.values.device.type == "cuda" and self.values.dtype != torch.float64
        norms = self._plain_norms.detach().numpy()
        if norms.min(initial=1) > SMALLEST_NORM and norms.max(initial=1) < LARGEST_NORM:
            return False
        is_doubtful = ~((self._plain_norms > SMALLEST_NORM) & (self._plain_norms < LARGEST_NORM))
        return bool((self.values[is_doubtful] != 0).any())

    @property
    def nonzero(self) -> Float[Tensor, "utterance head"]:
        """Number of counted vectors that are not zero.

        A zero vector has no direction and enters no cosine.
        """
        return nonzero(*self.lengths)

    @property
    def lengths(self) -> tuple[Tensor, Tensor]:
        """The norm of every vector, and which tokens count: arguments of :func:`nonzero`."""
        return self.every_norm, self.tokens.counted.unsqueeze(1)

    @property
    def unit_sum(self) -> Float[Tensor, "utterance head dim"]:
        """Σ x / ‖x‖₂ over the tokens that count."""
        return self._both_sums[:, :, 0]

    @cached_property
    def _both_sums(self) -> Float[Tensor, "utterance head 2 dim"]:
        if self._joined is not None:
            every, heads = self._joined
            return every._both_sums[:, heads]
        # One matrix product, since reading the vectors takes longer than adding them.
        weights = self.tokens.summing_weights(self.values.shape[1], self.values.dtype)
        torch.div(*self._inverse_norm_parts, out=weights[:, :, 0])
        return weighted_sums(weights, self.values)

    @cached_property
    def unit_squares(self) -> Float[Tensor, "utterance head dim"]:
        """Σ (x / ‖x‖₂)² by dimension, over the tokens that count."""
        # The square of the inverse that stands for a zero vector would be infinite.
        inverse = torch.where(self.every_norm != 0, self._inverse_norms, 0)
        if self._is_out_of_scale:
            return (self.values * inverse.unsqueeze(-1)).square().sum(-2)
        weights = inverse.square().unsqueeze(-2)
        return weighted_sums(weights, self.values.square()).squeeze(-2)

    @property
    def _inverse_norms(self) -> Float[Tensor, "utterance head token"]:
        """1 / ‖x‖₂ of each vector that counts, else 0; the components of a zero vector are 0."""
        return torch.div(*self._inverse_norm_parts)

    @property
    def _inverse_norm_parts(self) -> tuple[Tensor, Tensor]:
        smallest = torch.finfo(self.values.dtype).tiny
        return self.tokens.counted.unsqueeze(1), self.every_norm.clamp_min(smallest)

    @property
    def sum(self) -> Float[Tensor, "utterance head dim"]:
        """Σ x over the tokens that count."""
        return self._both_sums[:, :, 1]

    @cached_property
    def kind_sums(self) -> Float[Tensor, "utterance head kind dim"]:
        """Σ x over the tokens of each type that occurs, special tokens included."""
        masks = self.tokens.kind_masks.to(self.values.dtype)
        return weighted_sums(masks.unsqueeze(1), self.values)

    @cached_property
    def counted_type_sums(self) -> Float[Tensor, "utterance head type dim"]:
        """Σ x over the tokens of each type that count."""
        if self._joined is not None:
            every, heads = self._joined
            return every.counted_type_sums[:, heads]
        masks = self.tokens.counted_type_masks.to(self.values.dtype)
        sums = weighted_sums(masks.unsqueeze(1), self.values)
        return sums[:, :, self.tokens.counted_types]


def nonzero(
    norms: Float[Tensor, "*batch head token"], counted: Bool[Tensor, "*batch 1 token"]
) -> Float[Tensor, "*batch head"]:
    """Number of counted vectors whose norm is not zero."""
    # Not "> 0", which would count NaN as zero and hide it.
    return ((norms != 0) & counted).sum(-1).double()


def norm_sum(
    norms: Float[Tensor, "*batch head token"], counted: Bool[Tensor, "*batch 1 token"]
) -> Float[Tensor, "*batch head"]:
    """Sum of the norms of counted vectors."""
    return (norms * counted).sum(-1)
