"""Sums over the tokens of long texts."""

import torch
from jaxtyping import Float
from torch import Tensor

# Number of tokens up to which a sum is taken at once: single precision loses digits with every term
# that is added to a sum.
TOKENS_AT_ONCE = 2**10


def weighted_sums(
    weights: Float[Tensor, "*#batch sum token"],
    values: Float[Tensor, "*#batch token dim"],
) -> Float[Tensor, "*batch sum dim"]:
    """Σ w_n x_n over tokens n, for each row of weights, in the precision of the values.

    In a long text, the sums of chunks of tokens are added in float64.
    """
    if not is_chunked(values.shape[-2]):
        return weights @ values
    chunks = zip(
        weights.split(TOKENS_AT_ONCE, -1),
        values.split(TOKENS_AT_ONCE, -2),
        strict=True,
    )
    sums = 0.0
    for some, of_some in chunks:
        sums = sums + (some @ of_some).double()
    return sums.to(values.dtype)


def is_chunked(tokens: int) -> bool:
    """Whether a sum over so many tokens is taken by chunks."""
    return tokens > TOKENS_AT_ONCE


def sum_type(tokens: int, dtype: torch.dtype) -> torch.dtype:
    """The type in which sums of chunks of so many tokens are added."""
    return torch.float64 if is_chunked(tokens) else dtype
