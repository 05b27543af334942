"""CANINE's local attention, which runs window by window: its windows as one attention over all tokens."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from analysis_lib.capture.attention_rows import AttentionRows
from analysis_lib.capture.tokens import Tokens
from analysis_lib.capture.visibility import Visibility


@dataclass(eq=False)
class Window:
    """One run of an attention module: over all tokens, or over a window of them.

    Attributes:
        query, key, value: by head.
        key_input: what the projection of keys read.
        weights: the attention weights.
    """

    query: Float[Tensor, "utterance head token head_dim"]
    key: Float[Tensor, "utterance head key head_dim"]
    value: Float[Tensor, "utterance head key value_dim"]
    key_input: Float[Tensor, "utterance key width"]
    weights: Float[Tensor, "utterance head token key"]


def joined(windows: list[Window]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values and key inputs of all windows, in the order of their tokens."""
    if len(windows) == 1:
        return windows[0].query, windows[0].key, windows[0].value, windows[0].key_input
    by_head = (torch.cat([getattr(w, space) for w in windows], 2) for space in ("query", "key", "value"))
    return *by_head, torch.cat([window.key_input for window in windows], 1)


def visibility_of_windows(windows: list[Window], queries: Tokens, keys: Tokens) -> Visibility:
    """Each query sees the keys of its own window."""
    if len(windows) == 1:
        return Visibility(queries, keys)
    blocks = (torch.ones(window.weights.shape[2:], device=queries.mask.device) for window in windows)
    return Visibility(queries, keys, seen_by=torch.block_diag(*blocks).expand(len(queries.mask), -1, -1))


def rows_of_windows(windows: list[Window], visibility: Visibility) -> AttentionRows:
    """The attention rows of all windows, from their weights."""
    entropy = torch.cat([torch.special.entr(window.weights).sum(-1) for window in windows], 2)
    type_masks = visibility.keys.type_masks.split([window.weights.shape[3] for window in windows], 2)
    indicators = [masks.to(entropy.dtype).transpose(1, 2).unsqueeze(1) for masks in type_masks]
    mass = torch.cat([window.weights @ types for window, types in zip(windows, indicators, strict=True)], 2)
    queries = visibility.queries.counted.to(mass.dtype)[:, None, None]
    return AttentionRows(entropy, (queries @ mass).squeeze(2), visibility.seen, visibility.pairs)
