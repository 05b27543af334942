"""Layers that wait for one another: their sums are those of each alone."""

import clouds
import pytest
import torch

from analysis_lib.capture import Activations, joining
from analysis_lib.capture.joining import Joining
from analysis_lib.capture.vectors import Vectors


def layers(count: int, tokens, widths: dict[str, tuple[int, int]]) -> list[Activations]:
    """Layers with spaces of so many heads and dimensions."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for layer in range(count):
        spaces = {}
        for name, (heads, width) in widths.items():
            values = torch.randn(2, heads, 3, width, generator=generator)
            spaces[name] = Vectors(values, tokens)
        made.append(Activations(layer, "blocks", f"layer.{layer}", tokens, spaces))
    return made


@pytest.fixture
def tokens():
    return clouds.tokens_of([[0, 3, 3], [3, 3]])


WIDTHS = {"hidden": (1, 8), "query": (4, 2), "key": (2, 2), "value": (2, 4)}


def test_joined_sums_are_those_of_each_layer_alone(tokens):
    received = []
    joined = Joining(received.append)
    own = layers(3, tokens, WIDTHS)
    for activations in own:
        joined.add(activations)
    assert received == []
    joined.flush()
    assert [activations.layer for activations in received] == [0, 1, 2]
    for activations, alone in zip(received, own, strict=True):
        for name, vectors in activations.spaces.items():
            expected = Vectors(alone.spaces[name].values, tokens)
            torch.testing.assert_close(vectors.values, expected.values, rtol=0, atol=0)
            for sums in ("unit_sum", "sum", "every_norm", "counted_type_sums"):
                torch.testing.assert_close(getattr(vectors, sums), getattr(expected, sums))


def test_sums_over_tokens_of_all_layers_are_one_product(tokens, monkeypatch):
    shapes = []
    product = joining.Vectors._both_sums.func

    def counted(vectors):
        shapes.append((*vectors.values.shape,))
        return product(vectors)

    monkeypatch.setattr(joining.Vectors._both_sums, "func", counted)
    received = []
    joined = Joining(received.append)
    for activations in layers(3, tokens, {"hidden": (1, 8), "query": (4, 2), "key": (2, 2)}):
        joined.add(activations)
    joined.flush()
    for activations in received:
        for vectors in activations.spaces.values():
            assert vectors.sum.shape == (2, vectors.values.shape[1], vectors.values.shape[-1])
    # Beside those of each of nine spaces, one of the hidden vectors and one of the heads.
    assert {(2, 3, 3, 8), (2, 18, 3, 2)} <= {*shapes}


def test_what_the_model_changes_in_place_does_not_change_a_layer_that_waits(tokens):
    received = []
    joined = Joining(received.append)
    [activations] = layers(1, tokens, {"hidden": (1, 8)})
    before = activations.spaces["hidden"].values.clone()
    joined.add(activations)
    activations.spaces["hidden"].values.zero_()
    joined.flush()
    torch.testing.assert_close(received[0].spaces["hidden"].values, before, rtol=0, atol=0)


def test_vectors_of_two_layers_stay_the_same_object(tokens):
    """Post-norm attention reads the hidden vectors of the layer before."""
    received = []
    joined = Joining(received.append)
    first, second = layers(2, tokens, {"hidden": (1, 8)})
    second.spaces["attention_input"] = first.spaces["hidden"]
    joined.add(first)
    joined.add(second)
    joined.flush()
    assert received[1].spaces["attention_input"] is received[0].spaces["hidden"]


def test_layers_with_many_vectors_do_not_wait(tokens, monkeypatch):
    monkeypatch.setattr(joining, "MOST", 2 * 3 * 8 - 1)
    received = []
    joined = Joining(received.append)
    [small] = layers(1, tokens, {"hidden": (1, 4)})
    [large] = layers(1, tokens, {"hidden": (1, 8)})
    joined.add(small)
    joined.add(large)
    # In order, and without a copy of the large one.
    assert len(received) == 2
    assert received[1] is large
