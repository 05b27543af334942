"""The vectors of one space in one layer of a batch."""

from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from analysis_lib.capture.tokens import Tokens


def wide(values: Tensor) -> Tensor:
    """The values in at least single precision, since sums in half precision lose most digits."""
    return values.float() if values.dtype in (torch.bfloat16, torch.float16) else values


# Range of norms in which single precision can hold the squares of all components, and their sum.
SMALLEST_NORM, LARGEST_NORM = 1e-15, 1e18


class Vectors:
    """Vectors of one space in one layer of a batch, and the sums over tokens that metrics share.

    Each sum is computed once, on first use. Sums over the tokens of one utterance, at most a few
    hundred terms, are in the model's precision, or in single precision if that is half; metrics add
    up utterances in float64.

    Attributes:
        values: the vectors; hidden vectors have one head.
        tokens: the tokens of the vectors.
    """

    def __init__(self, values: Float[Tensor, "utterance head token dim"], tokens: Tokens):
        self.values = values
        self.tokens = tokens

    @property
    def counts(self) -> Float[Tensor, " utterance"]:
        """Number of vectors of each utterance that count."""
        return self.tokens.counts

    @cached_property
    def norms(self) -> Float[Tensor, "utterance head token"]:
        """‖x‖₂ of every vector, 0 where the token does not count."""
        if self._is_out_of_scale:
            norms = torch.linalg.vector_norm(self.values, dim=-1, dtype=torch.float64).to(
                self.values.dtype
            )
        else:
            norms = self._plain_norms
        return norms * self.tokens.counted.unsqueeze(1)

    @cached_property
    def _plain_norms(self) -> Float[Tensor, "utterance head token"]:
        return torch.linalg.vector_norm(self.values, dim=-1)

    @cached_property
    def _is_out_of_scale(self) -> bool:
        """Whether double precision is needed because single precision cannot hold all squares."""
        if self.values.dtype == torch.float64 or self.values.device.type != "cpu":
            # On a GPU, looking at the norms would need a synchronisation.
            return self.values.device.type == "cuda" and self.values.dtype != torch.float64
        is_doubtful = ~((self._plain_norms > SMALLEST_NORM) & (self._plain_norms < LARGEST_NORM))
        return bool(is_doubtful.any()) and bool((self.values[is_doubtful] != 0).any())

    @cached_property
    def nonzero(self) -> Float[Tensor, "utterance head"]:
        """Number of counted vectors that are not zero.

        A zero vector has no direction and enters no cosine.
        """
        # Not "> 0", which would count NaN as zero and hide it.
        return (self.norms != 0).sum(-1).double()

    @property
    def zeros(self) -> Int[Tensor, ""]:
        """Number of counted vectors that are zero, in all utterances and heads."""
        return (self.counts.unsqueeze(1) - self.nonzero).sum().long()

    @property
    def unit_sum(self) -> Float[Tensor, "utterance head dim"]:
        """Σ x / ‖x‖₂ over the tokens that count."""
        return self._both_sums[:, :, 0]

    @cached_property
    def _both_sums(self) -> Float[Tensor, "utterance head 2 dim"]:
        # One matrix product, since reading the vectors takes longer than adding them.
        counted = (
            self.tokens.counted.to(self.values.dtype).unsqueeze(1).expand(self.values.shape[:3])
        )
        return torch.stack([self._inverse_norms, counted], -2) @ self.values

    @cached_property
    def unit_squares(self) -> Float[Tensor, "utterance head dim"]:
        """Σ (x / ‖x‖₂)² by dimension, over the tokens that count."""
        inverse = self._inverse_norms
        if self._is_out_of_scale:
            return (self.values * inverse.unsqueeze(-1)).square().sum(-2)
        return (inverse.square().unsqueeze(-2) @ self.values.square()).squeeze(-2)

    @property
    def _inverse_norms(self) -> Float[Tensor, "utterance head token"]:
        """/ ‖x‖₂ of each vector; 0 where it has no direction."""
        return torch.where(self.norms != 0, self.norms.reciprocal(), 0)

    @property
    def sum(self) -> Float[Tensor, "utterance head dim"]:
        """Σ x over the tokens that count."""
        return self._both_sums[:, :, 1]

    @cached_property
    def kind_sums(self) -> Float[Tensor, "utterance head kind dim"]:
        """Σ x over the tokens of each type that occurs, special tokens included."""
        return self.tokens.kind_masks.to(self.values.dtype).unsqueeze(1) @ self.values

    @cached_property
    def counted_type_sums(self) -> Float[Tensor, "utterance head type dim"]:
        """Σ x over the tokens of each type that count."""
        if self.tokens.silent is None:
            sums = self.tokens.of_types(self.kind_sums)
        else:
            masks = (self.tokens.type_masks * self.tokens.counted.unsqueeze(1)).to(
                self.values.dtype
            )
            sums = masks.unsqueeze(1) @ self.values
        return sums[:, :, self.tokens.counted_types]
