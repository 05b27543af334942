"""Attention rows without the weights: formed, fused, and in chunks, they are the same."""

import math

import pytest
import torch
from torch.nn import functional

from analysis_lib.capture import attention_rows
from analysis_lib.models import TOKEN_TYPES

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("sharpness", [0.1, 1.0, 6.0])
def test_fused_rows_are_formed_rows(dtype, masked, sharpness):
    generator = torch.Generator().manual_seed(0)
    utterances, heads, tokens, head_dim = 3, 2, 40, 8
    query, key, value = (
        torch.randn(utterances, heads, tokens, head_dim, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    query = query * sharpness
    lengths = torch.tensor([40, 23, 2]) if masked else torch.full((3,), 40)
    real = torch.arange(tokens) < lengths.unsqueeze(1)
    mask = real[:, None, None].expand(-1, 1, tokens, -1) if masked else None
    kinds = functional.one_hot(
        torch.randint(len(TOKEN_TYPES), (utterances, tokens), generator=generator), len(TOKEN_TYPES)
    )
    indicators = (kinds * real.unsqueeze(-1)).transpose(1, 2).double()
    arguments = (query, key, value, mask, head_dim**-0.5, indicators)

    scores = query @ key.transpose(2, 3) * head_dim**-0.5
    weights = scores.masked_fill(~real[:, None, None], -math.inf).softmax(-1)
    exact = (weights @ value, torch.special.entr(weights).sum(-1), weights @ indicators.transpose(1, 2).unsqueeze(1))

    cast = tuple(a.to(dtype) if torch.is_tensor(a) and a.is_floating_point() else a for a in arguments)
    tolerance = 1e-12 if dtype is torch.float64 else 2e-5
    for rows in (attention_rows._formed_rows(*cast), attention_rows._fused_rows(*cast)):
        for found, expected in zip(rows, exact, strict=True):
            torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


def test_formed_rows_in_chunks_are_formed_rows_at_once(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 3, 11, 4, generator=generator) for _ in range(3))
    mask = (torch.arange(11) < torch.tensor([[11], [6]]))[:, None, None].expand(-1, 1, 11, -1)
    arguments = (query, key, value, mask, 0.5, torch.ones(2, 4, 11))
    at_once = attention_rows._formed_rows(*arguments)
    monkeypatch.setattr(attention_rows, "FORMED_ELEMENTS", 2 * 3 * 11 * 3)
    for found, expected in zip(attention_rows._formed_rows(*arguments), at_once, strict=True):
        torch.testing.assert_close(found, expected)


def test_rows_with_a_bias_are_formed_in_chunks_or_not(monkeypatch):
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(2, 3, 11, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = (torch.arange(11) < torch.tensor([[11], [6]]))[:, None, None].expand(-1, 1, 11, -1)
    bias = torch.randn(1, 3, 11, 11, generator=generator, dtype=torch.float64)
    kinds = torch.rand(2, 4, 11, generator=generator, dtype=torch.float64)
    counted = torch.rand(2, 11, generator=generator) < 0.7
    weights = (0.5 * query @ key.mT + bias).masked_fill(~mask, -math.inf).softmax(-1)
    exact = (
        weights @ value,
        torch.special.entr(weights).sum(-1),
        torch.einsum("bhmn,btn,bm->bht", weights, kinds, counted.double()),
    )
    before = bias.clone()
    for elements in (attention_rows.FORMED_ELEMENTS, 2 * 3 * 11 * 2):
        monkeypatch.setattr(attention_rows, "FORMED_ELEMENTS", elements)
        found = attention_rows.attend_with_rows(query, key, value, mask, 0.5, kinds, counted, bias)
        for one, expected in zip(found, exact, strict=True):
            torch.testing.assert_close(one, expected)
    assert torch.equal(bias, before)


def test_attend_with_rows_chooses_by_length(monkeypatch):
    monkeypatch.setattr(attention_rows, "_fused_rows", lambda *_: pytest.fail("formed rows were wanted"))
    attention_rows.attend_with_rows(*_attention(attention_rows.LONGEST_FORMED_ROW))
    monkeypatch.undo()
    with monkeypatch.context() as patch:
        patch.setattr(attention_rows, "_formed_rows", lambda *_: pytest.fail("fused rows were wanted"))
        attention_rows.attend_with_rows(*_attention(attention_rows.LONGEST_FORMED_ROW + 1))
    # A bias needs each weight.
    monkeypatch.setattr(attention_rows, "_fused_rows", lambda *_: pytest.fail("formed rows were wanted"))
    long = _attention(attention_rows.LONGEST_FORMED_ROW + 1)
    attention_rows.attend_with_rows(*long, bias=torch.zeros(1, 1, 1, attention_rows.LONGEST_FORMED_ROW + 1))


def _attention(tokens: int) -> tuple:
    vectors = torch.randn(1, 1, tokens, 4, generator=torch.Generator().manual_seed(0))
    counted = torch.ones(1, tokens, dtype=torch.bool)
    return vectors, vectors, vectors, None, 0.5, torch.ones(1, 4, tokens), counted
