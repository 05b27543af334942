"""Attention masks, and those of long texts, of which a few rows are made at a time.

A mask of all pairs of a text of 32,768 tokens has 2**30 entries, and what is computed from it as
many again. Memory stays linear in the length of a text if only a band of rows exists at once.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor
from torch.utils._pytree import tree_map_only

# Largest number of entries of a mask that is made as a whole, and of a band of a larger one.
LARGEST_MASK, LARGEST_MASK_ON_GPU = 2**22, 2**26

# Some rows of a mask, from the slice of their queries.
MakeRows = Callable[[slice], Bool[Tensor, "#utterance 1 query key"]]


class Band(NamedTuple):
    """Neighbouring queries, and a range of keys outside of which they see none."""

    queries: slice
    keys: slice


class LongMask(Tensor):
    """The mask of a long text: rows are made when they are needed, and none is kept.

    It has the shape, the type and the device of the mask. A function of PyTorch that receives it
    computes with the whole mask, so that a model may do with it what it likes.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, shape: Sequence[int], device: torch.device, rows: MakeRows) -> "LongMask":
        """A mask of a shape, utterance x 1 x query x key, made of ``rows``."""
        return Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)

    def __init__(self, _shape: Sequence[int], _device: torch.device, rows: MakeRows) -> None:
        self.rows = rows

    def __repr__(self) -> str:
        return f"LongMask({tuple(self.shape)})"

    def whole(self) -> Bool[Tensor, "utterance 1 query key"]:
        """All rows."""
        return self.rows(slice(0, self.shape[2])).expand(self.shape)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(cls, cls.whole, (args, kwargs or {}))
        return function(*args, **kwargs)


def is_long(shape: Sequence[int], device: torch.device) -> bool:
    """Whether a mask of a shape is too large to be made as a whole."""
    return torch.Size(shape).numel() > _largest(device)


def _largest(device: torch.device) -> int:
    return LARGEST_MASK if device.type == "cpu" else LARGEST_MASK_ON_GPU


def made(shape: Sequence[int], device: torch.device, rows: MakeRows) -> Tensor:
    """A mask of a shape, utterance x 1 x query x key: as a whole, or a :class:`LongMask`."""
    if is_long(shape, device):
        return LongMask(shape, device, rows)
    return rows(slice(0, shape[2]))


def changed(mask: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """A mask after a change that concerns each row by itself and keeps its shape."""

    def rows(queries: slice) -> Tensor:
        before = rows_of(mask, queries)
        return change(before)

    return made(mask.shape, mask.device, rows)


def rows_of(mask: Tensor, queries: slice) -> Bool[Tensor, "#utterance 1 #query key"]:
    """The rows of some queries; a mask of one row is that of all queries."""
    if isinstance(mask, LongMask):
        return mask.rows(queries)
    if mask.shape[2] == 1:
        return mask
    return mask[:, :, queries]


def causal(queries: int, keys: int, device: torch.device) -> Bool[Tensor, "1 1 query key"]:
    """A mask that lets query m see the keys n ≤ m."""

    def rows(some: slice) -> Tensor:
        return is_earlier(some, keys, device)[None, None]

    shape = 1, 1, queries, keys
    return made(shape, device, rows)


def is_earlier(queries: slice, keys: int, device: torch.device) -> Bool[Tensor, "query key"]:
    """True where a key stands at or before a query."""
    count = max(keys, queries.stop)
    positions = torch.arange(count, device=device)
    return positions[:keys] <= positions[queries, None]


def bands(shape: Sequence[int], device: torch.device) -> list[Band]:
    """The bands of rows in which a mask of a shape is read: one, unless it is long."""
    utterances, _, queries, keys = shape
    row = utterances * keys
    size = max(1, _largest(device) // row)
    every = []
    for start in range(0, queries, size):
        end = min(start + size, queries)
        band = Band(slice(start, end), slice(0, keys))
        every.append(band)
    return every
