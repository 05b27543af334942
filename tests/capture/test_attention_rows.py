"""Attention rows without the weights: whatever is taken at once, they are what the weights would
give.
"""

import math

import pytest
import torch
from clouds import OTHER, tokens_of
from torch.nn import functional

from analysis_lib.capture import AttentionWeights, Block, Visibility, attention_rows
from analysis_lib.capture.masks import Band
from analysis_lib.models import TOKEN_TYPES

pytestmark = pytest.mark.kernels

UTTERANCES, HEADS, TOKENS, HEAD_DIM = 3, 2, 40, 8
# How many scores are held at once: all; those of an utterance, and of a head; eleven rows; less
# than one row.
EVERY = Band(slice(0, TOKENS), slice(0, TOKENS))
ROOMS = (2**19, HEADS * TOKENS**2, TOKENS**2, 11 * TOKENS, 1)


def of_earlier_keys(block: Block) -> torch.Tensor:
    is_earlier = block.query_positions[:, None] > block.key_positions
    shares = block.average(is_earlier.to(block.powers.dtype))
    torch.testing.assert_close(shares, (block.weights * is_earlier).sum(-1))
    return shares.sum(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seen", ["all", "real", "earlier"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("sharpness", [0.1, 1.0, 30.0])
def test_rows_are_those_of_the_weights(dtype, seen, biased, sharpness, monkeypatch):
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    query, key, value = (drawn(UTTERANCES, HEADS, TOKENS, HEAD_DIM) for _ in range(3))
    query = query * sharpness
    bias = drawn(1, HEADS, TOKENS, TOKENS) if biased else None
    lengths = torch.tensor([40, 23, 2]) if seen == "real" else torch.full((3,), TOKENS)
    mask = (torch.arange(TOKENS) < lengths.unsqueeze(1))[:, None, None]
    mask = (
        torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()[None, None]
        if seen == "earlier"
        else mask
    )
    kinds = torch.randint(len(TOKEN_TYPES), (UTTERANCES, TOKENS), generator=generator)
    kinds = functional.one_hot(kinds, len(TOKEN_TYPES)).transpose(1, 2).double()
    counted = (torch.rand(UTTERANCES, TOKENS, generator=generator) < 0.7).double()

    scores = query @ key.mT * HEAD_DIM**-0.5 + (bias if biased else 0)
    weights = scores.masked_fill(~mask, -math.inf).softmax(-1)
    entropy = torch.special.entr(weights).sum(-1)
    mass, received = (
        torch.einsum("bhmn,btn->bhmt", weights, kinds),
        torch.einsum("bhmn,bm->bhn", weights, counted),
    )
    exact = weights @ value, entropy, mass, received, weights.tril(-1).sum((2, 3))

    query, key, value, kinds = (one.to(dtype) for one in (query, key, value, kinds))
    bias, before = (None, None) if bias is None else (bias.to(dtype), bias.to(dtype, copy=True))
    hidden = None if seen == "all" else ~mask
    given = query, key, HEAD_DIM**-0.5, bias, hidden
    tokens = tokens_of([[OTHER] * TOKENS] * UTTERANCES)
    tolerance = 1e-12 if dtype is torch.float64 else 1e-4
    for room in ROOMS:
        monkeypatch.setattr(attention_rows, "SCORES_AT_ONCE", room)
        for rows in (7, 64):
            monkeypatch.setattr(attention_rows, "CAUSAL_ROWS", rows)
            softmax = attention_rows.Softmax(*given, causal=seen == "earlier")
            attention = AttentionWeights(Visibility(tokens, tokens), HEADS, softmax.blocks)
            found = attention_rows.attend(softmax, value, kinds)
            of_keys = attention.reduce(lambda block: block.received(counted))
            backward = attention.reduce(of_earlier_keys)
            for one, expected in zip((*found, of_keys, backward), exact, strict=True):
                torch.testing.assert_close(one.double(), expected, rtol=tolerance, atol=tolerance)
            assert (found[1] >= 0).all()
    assert bias is None or torch.equal(bias, before)


@pytest.mark.parametrize("room", ROOMS)
def test_every_row_is_taken_once(room, monkeypatch):
    monkeypatch.setattr(attention_rows, "SCORES_AT_ONCE", room)
    query, taken = (
        torch.zeros(UTTERANCES, HEADS, TOKENS, HEAD_DIM),
        torch.zeros(UTTERANCES, HEADS, TOKENS),
    )
    for causal in (False, True):
        for part in attention_rows.parts(query, EVERY, causal):
            assert taken[part].numel() * TOKENS <= max(room, TOKENS)
            taken[part] += 1
    assert (taken == 2).all()
