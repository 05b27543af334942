"""Tokens by their position in a text, the first few of them, and by their type."""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from analysis_lib.capture import Tokens
from analysis_lib.models import TOKEN_TYPES

# From the first token on.
POSITIONS = 8
# Of all tokens and of each slot: the position, 0 for any, and the type of token.
SLOT_POSITIONS = np.arange(1 + POSITIONS + len(TOKEN_TYPES))
SLOT_POSITIONS[1 + POSITIONS :] = 0
SLOT_TYPES = np.array(["all"] * (1 + POSITIONS) + [*TOKEN_TYPES])


def slots_of(tokens: Tokens) -> Float[Tensor, "utterance slot token"]:
    """1 where a token is at one of the first positions, or of a type, in this order; else 0."""
    position = tokens.mask.cumsum(1) * tokens.mask
    # Padding is at 0, and what comes later behind the last.
    position = position.clamp_max(POSITIONS + 1)
    at_position = functional.one_hot(position, POSITIONS + 2)
    at_position = at_position[..., 1:-1].transpose(1, 2)
    parts = at_position.double(), tokens.type_masks.double()
    return torch.cat(parts, 1)


def with_all(sums: np.ndarray, axis: int = -1) -> np.ndarray:
    """The sums by slot, after those over all tokens, whatever their type."""
    types = range(POSITIONS, sums.shape[axis])
    every = np.take(sums, types, axis).sum(axis, keepdims=True)
    return np.concatenate([every, sums], axis)
