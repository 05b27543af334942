"""Slots of tokens: the first positions of a text, and the types of token."""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from analysis_lib.capture import Tokens
from analysis_lib.models import TOKEN_TYPES

# Number of positions with a slot of their own, from the first token on.
POSITIONS = 8
# Labels of "all tokens" and of each slot: the position, or 0 for any, and the type of token.
SLOT_POSITIONS = np.arange(1 + POSITIONS + len(TOKEN_TYPES))
SLOT_POSITIONS[1 + POSITIONS :] = 0
SLOT_TYPES = np.array(["all"] * (1 + POSITIONS) + [*TOKEN_TYPES])


def slots_of(tokens: Tokens) -> Float[Tensor, "utterance slot token"]:
    """Indicators (0 or 1) of the slots of each token: first positions, then types of token."""
    position = tokens.mask.cumsum(1) * tokens.mask
    # Padding goes to position 0, and all later tokens to the position after the last slot.
    position = position.clamp_max(POSITIONS + 1)
    at_position = functional.one_hot(position, POSITIONS + 2)
    at_position = at_position[..., 1:-1].transpose(1, 2)
    parts = at_position.double(), tokens.type_masks.double()
    return torch.cat(parts, 1)


def with_all(sums: np.ndarray, axis: int = -1) -> np.ndarray:
    """The sums by slot, preceded by those over all tokens."""
    types = range(POSITIONS, sums.shape[axis])
    every = np.take(sums, types, axis).sum(axis, keepdims=True)
    return np.concatenate([every, sums], axis)
