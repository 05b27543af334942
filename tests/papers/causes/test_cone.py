"""The page on what the cone is made of."""

import numpy as np
import pandas as pd
import pytest
import tiny
import torch
from planted import run_cells

from analysis_book.papers import cones
from analysis_lib import Corpus, load_corpus, load_model, measure
from analysis_lib.metrics.anisotropy import Anisotropy

CORPUS = Corpus("texts", tiny.TEXTS)


@pytest.fixture
def folder(tmp_path):
    return tiny.save(tmp_path / "bert", "bert")


def hidden(layer: int) -> np.ndarray:
    model, tokenizer = tiny.build("bert")
    with torch.no_grad():
        read = (
            model.double().eval()(**tokenizer(t, return_tensors="pt"), output_hidden_states=True)
            for t in tiny.TEXTS
        )
        return torch.cat([found.hidden_states[layer][0] for found in read]).numpy()


def mean_cosine(vectors: np.ndarray) -> float:
    units = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = units @ units.T
    return cosines[~np.eye(len(units), dtype=bool)].mean()


def test_parts_add_up_and_without_some_dimensions_it_is_the_cosine_of_the_others(folder):
    without = cones.WithoutDimensions("without", {layer: (layer, 5) for layer in range(4)})
    model = load_model(folder, dtype="float64")
    tables = measure(model, CORPUS, ["cosine_by_dimension", Anisotropy(), without], progress=False)
    vectors = hidden(2)
    assert cones.parts(tables).loc[2].sum() == pytest.approx(mean_cosine(vectors), rel=1e-9)
    found = tables["without"].set_index("layer")["cosine"]
    assert found[2] == pytest.approx(mean_cosine(np.delete(vectors, [2, 5], axis=1)), rel=1e-9)


def test_a_random_direction_has_a_third_of_the_dimensions():
    direction = np.random.default_rng(0).normal(size=(200, 600))
    numbers = cones.effective_number(direction**2)
    assert numbers.mean() == pytest.approx(200, rel=0.02)


def test_partition_function():
    rows = np.random.default_rng(0).normal(size=(400, 8))
    centred = rows - rows.mean(0)
    # A common vector lets the sum grow along it, and shrink against it.
    assert cones.partition_isotropy(rows + 1.0) < 0.1 < cones.partition_isotropy(centred)
    one, both = (cones.partition_isotropy(rows + 0.3, signs) for signs in (False, True))
    assert both <= one
    vectors = np.linalg.eigh(rows.T @ rows)[1]
    sums = np.exp(rows @ vectors).sum(0)
    assert cones.partition_isotropy(rows) == pytest.approx(sums.min() / sums.max())


def test_what_is_measured_of_a_model_and_its_copy(folder):
    found = cones._measured(str(folder), CORPUS)
    layers = (
        found[found["space"].eq("hidden") & found["weights"].eq("trained")]
        .groupby("quantity")["layer"]
        .size()
    )
    assert layers.loc[["cosine", "share", "effective", "without_top", "without_random"]].eq(4).all()
    at = found[found["weights"].eq("trained") & found["layer"].eq(2)].set_index("quantity")["value"]
    vectors = hidden(2)
    assert at["cosine"] == pytest.approx(mean_cosine(vectors), rel=1e-5)
    units = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    parts = (units.sum(0) ** 2 - (units**2).sum(0)) / (len(units) * (len(units) - 1))
    top = np.argsort(parts)[-3:]
    assert at["share"] == pytest.approx(parts[top].sum() / parts.sum(), rel=1e-4)
    assert at["effective"] == pytest.approx(parts.sum() ** 2 / (parts**2).sum(), rel=1e-4)
    assert at["without_top"] == pytest.approx(
        mean_cosine(np.delete(vectors, top, axis=1)), rel=1e-4
    )
    last = found[found["layer"].eq(3) & found["quantity"].eq("effective")].set_index("weights")[
        "value"
    ]
    assert last["ratio"] == pytest.approx(last["untrained"] / last["trained"])


@pytest.mark.parametrize(
    ("name", "data", "limit"), [("minilm", "wikipedia", 1500), ("vit-s14", "photographs", 80)]
)
def test_what_comes_with_the_book_is_of_the_texts_of_its_page(monkeypatch, name, data, limit):
    monkeypatch.setattr(cones, "_measured", None)
    found = cones.of_both(name, load_corpus(data, limit=limit, seed=0))
    assert {"trained", "untrained", "ratio"} == set(found["weights"])


def test_verdicts_of_the_page():
    rows = [("trained", "share", layer, 0.6 - 0.1 * (layer == 2), 0.05) for layer in range(7)]
    rows = [*rows, ("trained", "share", 7, 0.1, 0.05), ("ratio", "effective", 7, 5.0, 1.0)]
    cone = pd.DataFrame(rows, columns=["weights", "quantity", "layer", "value", "reach"])
    cone = cone.assign(
        ci_low=cone["value"] - cone["reach"], ci_high=cone["value"] + cone["reach"], groups=20
    )
    cone = pd.concat(
        [cone.assign(model="MiniLM"), cone.assign(model="low", value=0.3, ci_low=0.2, ci_high=0.4)]
    )
    names = {"cone": cone.reset_index(drop=True), "read": {"minilm": range(40), "low": range(3)}}
    found = run_cells("causes/cone", "def estimates", "claims.judged(", **names)["verdicts"]
    # Layers 3 and 4 of 7 are in the middle third; not 2, where the share is at the bound.
    assert found["verdict"].tolist() == ["holds", "does not hold", "holds", "does not hold"]
