"""Whose sums the entries of a tensor join, and what a mask lets queries see."""

import math

import pytest
import torch

from analysis_lib.capture import Owners, Tokens, Visibility, masks
from analysis_lib.capture.tokens import _add_in_order, _membership


def test_entries_join_the_sums_of_their_groups():
    owners = Owners([7, 2, 7, 5])
    assert owners.distinct == (2, 5, 7)
    assert owners.not_in(()) == (2, 5, 7)
    assert owners.not_in((5, 9)) == (2, 7)
    sums = torch.tensor([[1.0, 1], [0, 0], [0, 0], [3, 3]], dtype=torch.float64)
    owners.add_to(sums, (7, 5, 2, 9), torch.tensor([[1.0, 2], [3, 4], [5, 6], [7, 8]]))
    assert sums.tolist() == [[7, 9], [7, 8], [3, 4], [3, 3]]
    assert owners.not_in((7, 5, 2, 9)) == ()
    owners.add_to(sums, (7, 5, 2, 9), torch.tensor([[True, False]] * 4))
    assert sums.tolist() == [[9, 9], [8, 8], [4, 4], [3, 3]]


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_in_order_or_not_it_is_the_same_sum(shape):
    generator = torch.Generator().manual_seed(0)
    places = torch.randint(4, (50,), generator=generator)
    values = torch.randn(50, *shape, generator=generator, dtype=torch.float64)
    sums = torch.randn(4, *shape, generator=generator, dtype=torch.float64)
    expected = sums.index_add(0, places, values)
    _add_in_order(sums, _membership(places, sums), values)
    torch.testing.assert_close(sums, expected)


@pytest.mark.parametrize("rows", [1, 3, 1024])
@pytest.mark.parametrize("padding", ["none", "after", "before"])
@pytest.mark.parametrize("kind", ["everyone", "causal", "window", "one for all queries"])
def test_a_mask_is_known_for_what_it_is(kind, padding, rows, monkeypatch):
    monkeypatch.setattr(masks, "LARGEST_MASK", rows * 2 * 8)
    real = torch.ones(2, 8, dtype=torch.bool)
    if padding == "after":
        real[1, 5:] = False
    if padding == "before":
        real[1, :3] = False
    of_texts = Tokens(real, torch.full((2, 8), 4), (0, 1))
    mask = real[:, None, None]
    if kind in ("everyone", "causal", "window"):
        mask = mask.expand(2, 1, 8, 8)
    if kind == "causal":
        mask = mask.tril()
    if kind == "window":
        mask = mask.tril(1).triu(-1)
    found = Visibility.from_mask(mask, of_texts, of_texts)
    assert found.everyone == (kind in ("everyone", "one for all queries"))
    assert found.causal == (kind == "causal")
    if kind == "window":
        assert torch.equal(found.seen_by, mask)
    assert len(found.bands) == math.ceil(8 / rows)
    outside = mask.expand(2, 1, 8, 8) & real[:, None, :, None]
    for band in found.bands:
        outside[:, :, band.queries, band.keys] = False
    assert not outside.any()
    if found.causal:
        assert found.plain == (padding != "before")


def test_runs_are_summed_alike_with_and_without_an_order():
    of_texts = Tokens(torch.ones(5, 2) > 0, torch.full((5, 2), 4), (3, 3, 1, 3, 3))
    values = torch.arange(10.0).reshape(5, 1, 2)
    expected = [[[2, 4]], [[4, 5]], [[14, 16]]]
    assert of_texts.by_run(values).tolist() == expected
    members = of_texts._run_members(torch.float32)
    assert (members @ values.flatten(1)).unflatten(1, (1, 2)).tolist() == expected
