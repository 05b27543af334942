"""What the corpus says beside a typed sentence, against measurements of one change each."""

import pandas as pd
import pytest
import tiny

from analysis_book.papers import sentences
from analysis_lib import load_corpus, load_model, measure
from analysis_lib.capture.interventions import Replace

DIMENSION = 3


@pytest.fixture(scope="module")
def model(tiny_folder):
    return load_model(tiny_folder("bert"))


@pytest.fixture(scope="module")
def corpus():
    return load_corpus([f"{text} {number}" for number in range(6) for text in tiny.TEXTS[:2]])


@pytest.fixture(scope="module")
def table(model, corpus) -> pd.DataFrame:
    return sentences.beside(model, corpus, DIMENSION)


def value(table: pd.DataFrame, state: str, layer: int, quantity: str, hidden: int | None = None):
    rows = table[
        (table["state"] == state) & (table["layer"] == layer) & (table["quantity"] == quantity)
    ]
    if hidden is not None:
        rows = rows[rows["hidden"] == hidden]
    return rows["value"].item()


def in_layer(model, corpus, layer: int, change: Replace | None) -> pd.Series:
    tables = measure(model, corpus, sentences.METRICS, intervention=change, progress=False)
    return sentences.in_layer(tables, layer)


@pytest.mark.parametrize("layer", [1, 2])
def test_each_number_is_that_of_one_measurement(model, corpus, table, layer):
    plain = in_layer(model, corpus, layer, None)
    changes = {
        "dimension": Replace("key_side", layers=layer, dimensions=DIMENSION, of="others"),
        "query": Replace("query", layers=layer, by="centre", of="others"),
        "cls": Replace("key_side", layers=layer, tokens="cls", by="other_of_type", of="others"),
    }
    for quantity in ("cls", "entropy"):
        for state in ("nothing", "mean"):
            assert value(table, state, layer, quantity) == pytest.approx(plain[quantity])
    for state, change in changes.items():
        changed = in_layer(model, corpus, layer, change)
        assert value(table, state, layer, "entropy") == pytest.approx(changed["entropy"])
        lost = 1 - changed["cls"] / plain["cls"]
        assert value(table, state, layer, "lost") == pytest.approx(lost, abs=1e-9)
        cosine = changed[f"cosine {layer}"]
        assert value(table, state, layer, "cosine", layer) == pytest.approx(cosine)
    centred = Replace("residual", layers=layer, by="centre", of="others")
    without_mean = in_layer(model, corpus, layer, centred)[f"cosine {layer}"]
    assert value(table, "mean", 0, "cosine", layer) == pytest.approx(without_mean)
    assert abs(without_mean - plain[f"cosine {layer}"]) > 0.01
    assert value(table, "nothing", 0, "cosine", layer) == pytest.approx(plain[f"cosine {layer}"])


def test_each_number_stands_once_and_has_its_interval(table):
    assert [*table] == sentences.COLUMNS
    assert not table.duplicated(["state", "layer", "quantity", "hidden"]).any()
    moving = table[table["high"].notna()]
    assert len(moving) > 0.8 * len(table)
    assert (moving["low"] < moving["value"]).all()
    assert (moving["value"] < moving["high"]).all()


def test_the_shipped_rows_are_those_of_the_page():
    """Of the arms and the texts of the default profile."""
    model = load_model("minilm")
    corpus = load_corpus("wikipedia:short", limit=1500, seed=0)
    rows = sentences.causes.shipped("sentences-minilm", corpus)
    arms = sentences.arms(99, 6)
    assert {*rows.index.unique("arm")} == {*arms}
    # One of its numbers anew, of fewer texts.
    few = corpus.take(range(100))
    lost = (
        1
        - in_layer(model, few, 2, arms["dimension 99"][2])["cls"]
        / in_layer(model, few, 2, None)["cls"]
    )
    weights = rows["all"].xs("cls", level="quantity")
    shipped = 1 - weights["dimension 99", 2] / weights["nothing", 2]
    assert lost == pytest.approx(shipped, abs=0.01)
