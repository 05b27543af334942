"""Fingerprints of weights: any change changes them, and nothing else does."""

import hashlib

import pytest
import torch

from analysis_lib.models.fingerprint import SUMS, fingerprint


def of(tensor: torch.Tensor) -> str:
    return fingerprint([("weight", tensor)])


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(300, 768, generator=torch.Generator().manual_seed(0))


def test_it_is_the_hash_of_sums_of_whole_numbers(weight):
    numbers = weight.flatten().view(torch.int64).tolist()
    sums = [sum(numbers[start::SUMS]) % 2**64 for start in range(SUMS)]
    content = b"".join(value.to_bytes(8, "little") for value in sums)
    expected = hashlib.sha256(b"weight torch.float32 (300, 768)\n" + content)
    assert of(weight) == expected.hexdigest()


def test_the_same_numbers_have_the_same_one(weight):
    assert of(weight.clone()) == of(weight)
    assert of(weight.T.contiguous().T) == of(weight)
    one = torch.get_num_threads()
    torch.set_num_threads(1)
    assert of(weight) == of(weight.clone())
    torch.set_num_threads(one)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.bool]
)
def test_a_change_of_one_number_is_seen(dtype):
    for shape in ((), (1,), (7,), (40, 333)):
        weight = (torch.rand(shape, generator=torch.Generator().manual_seed(1)) * 100).to(dtype)
        for place in {0, weight.numel() // 2, weight.numel() - 1}:
            changed = weight.clone()
            changed.view(-1)[place] = not changed.view(-1)[place]
            assert of(changed) != of(weight), (shape, place)


def test_other_orders_names_shapes_and_types_are_others(weight):
    others = [weight.flip(0), weight.T, weight.reshape(768, 300), weight.double(), weight[:-1]]
    for width in (1, 2, 3):
        others.append(torch.cat([weight[width : 2 * width], weight[:width], weight[2 * width :]]))
    known = {of(weight), *map(of, others), fingerprint([("bias", weight)]), fingerprint([])}
    assert len(known) == len(others) + 3


def test_a_view_that_begins_anywhere_can_be_read():
    values = torch.arange(30_000, dtype=torch.float32)
    assert of(values[1:]) == of(values[1:].clone())
