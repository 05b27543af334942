"""Sums by key and jackknife group: the same, however values are added."""

import pickle
import tracemalloc

import numpy as np
import pytest
import torch

from analysis_lib.capture import Owners
from analysis_lib.metrics import ScoreContributions, sums
from analysis_lib.metrics.sums import WHOLE, GroupSums, Sums
from analysis_lib.models import TOKEN_TYPES


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_hand(values: torch.Tensor, groups: tuple[int, ...], group: int) -> torch.Tensor:
    return values[[number == group for number in groups]].sum(0)


@pytest.mark.parametrize("waiting", [1, 2**26])
@pytest.mark.parametrize("stacked", [1, 2**12])
def test_sums_are_those_of_the_groups(waiting, stacked, monkeypatch):
    """Of values that wait or not, that are stacked or not, of keys that come later or not at all,
    and of groups that come later.
    """
    monkeypatch.setattr(sums, "MOST_WAITING", waiting)
    monkeypatch.setattr(sums, "LARGEST_STACKED", stacked)
    keys = [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    batches = [((4, 2, 4), keys[:2]), ((2, 7, 2), keys), ((7, 7, 1), [keys[3], keys[0]])]
    added = Sums()
    expected = {}
    for number, (groups, some) in enumerate(batches):
        owners = Owners(groups)
        for place, key in enumerate(some):
            shape = (3, 2, 5) if key[0] == "a" else (3,)
            values = drawn(*shape, seed=10 * number + place)
            added.add(key, [values], owners)
            for group in set(groups):
                one = by_hand(values, groups, group)
                expected[key, group] = expected.get((key, group), 0) + one
        added.settle()
    assert [*added] == keys
    for (key, group), total in expected.items():
        groups, values = added[key]
        torch.testing.assert_close(values[groups.index(group)], total)
    for key, (groups, values) in added.items():
        for group, value in zip(groups, values, strict=True):
            assert (key, group) in expected or not value.any()
        in_order, array = added.arrays()[key]
        assert in_order == tuple(sorted(groups))
        assert all(
            (values[groups.index(g)].numpy() == a).all()
            for g, a in zip(in_order, array, strict=True)
        )
    again = pickle.loads(pickle.dumps(added))
    assert all(torch.equal(again[key].values, added[key].values) for key in keys)


def test_a_function_is_called_once_for_all_keys():
    calls = []

    def products(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        calls.append(left.shape)
        return (left * right).sum(-1)

    added = Sums()
    owners = Owners([0, 1])
    parts = {layer: (drawn(2, 3, 4, seed=layer), drawn(2, 1, 4, seed=9)) for layer in range(5)}
    for layer, values in parts.items():
        added.add(("products", layer), values, owners, products)
    assert not calls
    for layer, (left, right) in parts.items():
        torch.testing.assert_close(added["products", layer].values, (left * right).sum(-1))
    assert calls == [(2, 5, 3, 4)]


def test_a_key_that_is_added_twice_in_a_batch_counts_twice():
    added = Sums()
    for _ in range(2):
        added.add(("a", 0), [torch.ones(2)], Owners([0, 1]))
    assert added["a", 0].values.tolist() == [2, 2]


def test_sums_over_all_groups_and_sums_that_are_given():
    begun = drawn(2, 4)
    added = Sums({("a", 0): GroupSums((3, 5), begun.numpy().copy())})
    added.add(("a", 0), [torch.ones(1, 4)], Owners([5]))
    added.add(("whole", 0), [torch.ones(1, 2)], Owners([WHOLE]))
    assert added["whole", 0].groups == (WHOLE,)
    expected = begun + torch.tensor([[0], [1]])
    assert added["a", 0].values.tolist() == expected.tolist()


def test_large_sums_are_not_copied():
    added = Sums()
    values = drawn(3, 2**12 + 1)
    added.add(("large", 0), [values], Owners([7, 2, 7]))
    [(_, array)] = added.arrays().values()
    again, same = added.arrays()["large", 0]
    assert np.shares_memory(array, same)
    assert again == (2, 7)
    torch.testing.assert_close(
        torch.from_numpy(array), torch.stack([values[1], values[0] + values[2]])
    )


def test_a_large_table_is_in_memory_once():
    """Neither its columns nor the sums that it is made of are copied as a whole."""
    layers, groups = 12, (0, 1, 2, 3, 4)
    parts = {}
    for layer in range(layers):
        pairs = torch.zeros(len(groups), len(TOKEN_TYPES))
        for kind in (4, 5):
            pairs[:, kind] = 3
            parts["sum", kind, layer] = GroupSums(groups, drawn(len(groups), 8, 512, seed=layer))
        parts["pairs", layer] = GroupSums(groups, pairs.double())
    metric = ScoreContributions().fresh(parts)
    metric.table()
    tracemalloc.start()
    table = metric.table()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(table) == layers * 8 * 512 * 3
    assert peak < 1.5 * table.memory_usage().sum()
