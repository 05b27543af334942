"""What the vectors of a stack stand for: one rule for each value of ``parts.Stack.tokens``."""

from collections.abc import Callable

import torch

from analysis_lib.capture.inputs import Batch
from analysis_lib.capture.tokens import Tokens, unpadded
from analysis_lib.models import LoadedModel


def _molecules(loaded: LoadedModel, batch: Batch, count: int, args: tuple) -> Tokens:
    """CANINE's deep encoder reads [CLS], then one vector for about every four characters."""
    return unpadded(batch.groups, count, 1, batch.special_tokens)


def _blocks(loaded: LoadedModel, batch: Batch, count: int, args: tuple) -> Tokens:
    """MANTa's encoder reads as many blocks as it finds in a text: its attention mask says how many."""
    tokens = unpadded(batch.groups, count, 0, batch.special_tokens)
    if args[1] is not None:
        tokens.mask = args[1][:, 0].any(1).expand(len(batch.groups), -1)
    return tokens


def _patches(loaded: LoadedModel, batch: Batch, count: int, args: tuple) -> Tokens:
    return unpadded(batch.groups, count, loaded.layout.class_tokens, batch.special_tokens)


def _windows(loaded: LoadedModel, batch: Batch, count: int, args: tuple) -> Tokens:
    """Whisper pads a sound with silence to its window; each vector stands for two hops of the spectrogram."""
    tokens = unpadded(batch.groups, count)
    ends = -(-batch.lengths // (2 * loaded.processor.hop_length))
    tokens.silent = torch.arange(count, device=ends.device) >= ends.unsqueeze(1)
    return tokens


# Each is called with the model, the batch, the number of tokens, and the positional arguments of the stack's block.
TOKEN_RULES: dict[str, Callable[[LoadedModel, Batch, int, tuple], Tokens]] = {
    "text": lambda _, batch, *__: batch.tokens,
    "shifted": lambda _, batch, *__: batch.shifted,
    "molecules": _molecules,
    "blocks": _blocks,
    "patches": _patches,
    "frames": lambda _, batch, count, __: unpadded(batch.groups, count),
    "windows": _windows,
}
