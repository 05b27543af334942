"""Slots of tokens: the first positions of a text, and the types of token."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from analysis_lib.capture import Tokens

# Number of positions with a slot of their own, from the first token on.
POSITIONS = 8


def slot_positions(types: Sequence[str]) -> np.ndarray:
    """The position of "all tokens" and of each slot, or 0 for any."""
    positions = np.arange(1 + POSITIONS + len(types))
    positions[1 + POSITIONS :] = 0
    return positions


def slot_types(types: Sequence[str]) -> np.ndarray:
    """The type of the tokens of "all tokens" and of each slot."""
    return np.array(["all"] * (1 + POSITIONS) + [*types])


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
