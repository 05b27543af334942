"""Every architecture and variant of ``tiny``: each table against the naive reference of
``reference.py``.
"""

from functools import cache

import numpy as np
import pytest
import tiny
from reference import Reference, assert_agree

from analysis_lib import load_model, measure
from analysis_lib.models.parts import MODEL_LAYOUTS, expected_layout

FLOAT64 = (1e-9, 1e-11)
NAMES = tuple(tiny.EVERY_ARCHITECTURE)
MAPS = tuple(name for name in NAMES if expected_layout(tiny.EVERY_ARCHITECTURE[name][0]).maps)
# Their class and separator tokens can be left out.
WITH_SPECIAL_TOKENS = tuple(
    name for name in NAMES if tiny.kind(name) != "audio" and name not in MAPS
)


@pytest.fixture(scope="module")
def loaded(tiny_folder):
    """A function that gives an architecture in float64."""
    return cache(lambda name: load_model(str(tiny_folder(name)), dtype="float64"))


@pytest.fixture(scope="module")
def naive(tiny_folder):
    """A function that gives the reference of an architecture."""
    return cache(lambda name, **options: Reference(tiny_folder(name), tiny.items(name), **options))


def test_every_layout_is_tried():
    # What is read with a decoder has a test of its own.
    listed = {name for name in MODEL_LAYOUTS if "@" not in name}
    assert {model_type for model_type, *_ in tiny.EVERY_ARCHITECTURE.values()} >= listed


@pytest.mark.parametrize("name", NAMES)
def test_every_table(name, loaded, naive):
    """One by one, and in batches that pad texts of different lengths where that is allowed."""
    expected = naive(name).tables()
    for tokens_per_batch in (1, 10**6):
        tables = measure(
            loaded(name), tiny.corpus(name), tokens_per_batch=tokens_per_batch, progress=False
        )
        assert_agree(tables, expected, FLOAT64)
    shapes = [
        (layer.hidden.shape[1], *(layer.attention.shape if layer.attention else (None, None, None)))
        for layer in naive(name).utterances[0].layers
    ]
    own = tables.layers.query("stack != 'cross'")
    layers = own[["width", "heads", "key_heads", "head_width"]].astype(object)
    assert own["layer"].tolist() == list(naive(name).layers)
    assert list(layers.where(layers.notna(), None).itertuples(index=False, name=None)) == shapes


@pytest.mark.parametrize("name", WITH_SPECIAL_TOKENS)
def test_without_special_tokens_they_stay_keys_only(name, loaded, naive):
    tables = measure(loaded(name), tiny.corpus(name), special_tokens=False, progress=False)
    assert_agree(tables, naive(name, special_tokens=False).tables(), FLOAT64)


@pytest.mark.parametrize("name", MAPS)
def test_a_vector_for_each_position_of_a_map(name, loaded, naive):
    tables = measure(loaded(name), tiny.corpus(name), maps="positions", progress=False)
    assert_agree(tables, naive(name, maps="positions").tables(), FLOAT64)


@pytest.mark.kernels
@pytest.mark.parametrize("name", NAMES)
def test_hidden_anisotropy_in_single_precision(name, tiny_folder, naive):
    """Equal to the naive mean over all pairs of vectors to 1e-5."""
    measured = measure(
        load_model(str(tiny_folder(name))), tiny.corpus(name), "anisotropy", progress=False
    )["anisotropy"]
    hidden = measured[measured["space"] == "hidden"].sort_values("layer")
    utterances = naive(name).utterances
    for layer, cosine in enumerate(hidden["cosine"]):
        vectors = np.concatenate([utterance.layers[layer].vectors for utterance in utterances])
        units = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        pairs = np.triu_indices(len(units), 1)
        assert cosine == pytest.approx((units @ units.T)[pairs].mean(), abs=1e-5)
