"""Activations made of vectors whose geometry is known, for tests of metrics."""

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st

from analysis_lib import metrics
from analysis_lib.capture import Activations, Tokens, Vectors

CLS, SEP, REGISTER, DETECTION, FIRST, PUNCT, OTHER = range(7)
repeatable = settings(derandomize=True, deadline=None, max_examples=40)
seeds = st.integers(0, 2**32 - 1)


def tokens_of(
    types: list[list[int]], groups: list[int] | None = None, special_tokens: bool = True
) -> Tokens:
    """Utterances given by the types of their tokens."""
    longest = max(map(len, types))
    mask = torch.tensor([[True] * len(row) + [False] * (longest - len(row)) for row in types])
    padded = torch.tensor([row + [OTHER] * (longest - len(row)) for row in types])
    groups = list(range(len(types))) if groups is None else groups
    return Tokens(mask, padded, tuple(groups), special_tokens)


def activations_of(
    utterances: list[np.ndarray], space: str = "hidden", groups: list[int] | None = None, types=None
) -> Activations:
    """Layer 1 of a batch in which the given vectors (tokens x dim, or heads x tokens x dim) are
    those of ``space``.
    """
    stacked = [vectors if vectors.ndim == 3 else vectors[None] for vectors in utterances]
    types = types or [[OTHER] * vectors.shape[1] for vectors in stacked]
    tokens = tokens_of(types, groups)
    values = torch.full(
        (len(stacked), stacked[0].shape[0], tokens.mask.shape[1], stacked[0].shape[2]), 1e3
    ).double()
    for i, vectors in enumerate(stacked):
        values[i, :, : vectors.shape[1]] = torch.as_tensor(vectors)
    return Activations(1, "blocks", "layer.0", tokens, {space: Vectors(values, tokens)})


def accumulated(metric: metrics.Metric, *activations: Activations) -> metrics.Metric:
    for one in activations:
        metric.update(one)
    return metric
