"""Whose sums the entries of a tensor join."""

import pytest
import torch

from analysis_lib.capture import Owners
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
