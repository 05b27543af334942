"""Feature maps of convolutional networks, as vectors.

A hidden state is a map of shape image x channel x height x width. CvT's blocks have attention: theirs is a sequence of
the positions of the map, preceded by a class token in the last stage, and their further arguments are its height and
width.
"""

from jaxtyping import Float
from torch import Tensor


def class_tokens(hidden: Tensor, args: tuple) -> int:
    """How many class tokens precede the positions of a map; ``args`` are the positional arguments of the block."""
    return hidden.shape[1] - args[1] * args[2] if hidden.dim() == 3 else 0


def token_count(hidden: Tensor) -> int:
    """How many tokens the attention over a map reads: its positions and its class tokens."""
    return hidden.shape[1] if hidden.dim() == 3 else hidden[0, 0].numel()


def map_vectors(hidden: Tensor, args: tuple, maps: str) -> Float[Tensor, "image vector width"]:
    """The vectors of a map without its class tokens: with ``positions`` one per position, with ``flatten`` one."""
    is_sequence = hidden.dim() == 3
    positions = hidden[:, class_tokens(hidden, args) :] if is_sequence else hidden.flatten(2).transpose(1, 2)
    return positions if maps == "positions" else positions.flatten(1).unsqueeze(1)
