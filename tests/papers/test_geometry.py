"""geometry.json: its schema, and its numbers against naive ones in float64."""

import itertools
import json
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import tiny
import torch

from analysis_book.papers.geometry import (
    METRICS,
    QUANTITIES,
    VERSION,
    _differences,
    as_table,
    geometry_of,
    headlines,
    numbers,
)
from analysis_lib import AnalysisError, load_corpus, load_model, measure

SCHEMA = json.loads((Path(__file__).parents[2] / "data" / "geometry.schema.json").read_text())


def whole(*models: dict) -> dict:
    found = {"version": VERSION, "title": "T", "models": [*models], "differences": []}
    # As it is written: no NaN, no numpy.
    return json.loads(json.dumps(found, allow_nan=False))


@pytest.fixture(scope="module")
def measured(tiny_folder):
    return measure(
        load_model(str(tiny_folder("bert")), dtype="float64"),
        [*tiny.TEXTS],
        METRICS,
        progress=False,
    )


def test_the_schema_is_one_and_holds(measured):
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(whole(geometry_of(measured)), SCHEMA)
    assert geometry_of(measured)["devices"] == ["cpu"]


def test_the_schema_refuses_what_is_none(measured):
    model = geometry_of(measured)
    for broken in (
        {**model, "layers": []},
        {**model, "sinks": {}},
        {n: v for n, v in model.items() if n != "dtype"},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(whole(broken), SCHEMA)


def test_numbers_are_those_of_a_naive_pass(measured, tiny_folder):
    found = geometry_of(measured)
    loaded = load_model(str(tiny_folder("bert")), dtype="float64")
    model = loaded.model
    model.config._attn_implementation = "eager"
    hidden, entropies, to_first = [], [], []
    for text in tiny.TEXTS:
        inputs = {n: torch.tensor([v]) for n, v in loaded.tokenizer(text).items()}
        with torch.no_grad():
            out = model(**inputs, output_hidden_states=True, output_attentions=True)
        hidden.append(out.hidden_states[2][0].numpy())
        weights = out.attentions[1][0].numpy()
        entropies.append(-(weights * np.log(weights)).sum(-1) / np.log(weights.shape[-1]))
        to_first.append(weights[:, :, 0].mean(1))
    layer = found["layers"][2]
    every = np.concatenate(hidden)
    pairs = itertools.combinations(every, 2)
    cosine = np.mean([a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in pairs])
    assert layer["anisotropy"]["hidden"]["value"] == pytest.approx(cosine, rel=1e-9)
    assert layer["norm_of_mean"]["hidden"]["value"] == pytest.approx(
        np.linalg.norm(every.mean(0)), rel=1e-9
    )
    assert layer["mean_norm"]["hidden"]["value"] == pytest.approx(
        np.linalg.norm(every, axis=1).mean(), rel=1e-9
    )
    assert layer["entropy"]["value"] == pytest.approx(np.concatenate(entropies, 1).mean(), rel=1e-5)
    interval = layer["anisotropy"]["hidden"]
    assert interval["ci_low"] < interval["value"] < interval["ci_high"]
    heads = [
        row for row in found["sinks"]["heads"] if row["layer"] == 2 and row["key_type"] == "cls"
    ]
    assert [row["received"] for row in heads] == pytest.approx(
        np.mean(to_first, 0).tolist(), rel=1e-9
    )
    (share,) = [row for row in found["sinks"]["all_heads"] if row["key_type"] == "cls"]
    above = [row["received"] > 0.3 for row in found["sinks"]["heads"] if row["key_type"] == "cls"]
    assert share["share_of_heads"] == np.mean(above)
    norms = np.linalg.norm(every, axis=1)
    assert found["spikes"][2]["ratio"] == pytest.approx(norms.max() / np.median(norms), rel=0.012)


def test_a_difference_has_the_interval_of_pairs(measured):
    # With itself: nothing, for certain.
    rows = _differences(measured, measured)
    assert (rows[["difference", "ci_low", "ci_high"]].fillna(0) == 0).all(axis=None)
    assert len(rows) == len(numbers(measured))


def test_a_causal_model_has_spikes_at_its_first_token():
    found = geometry_of(
        measure(
            load_model("smollm2-135m"),
            load_corpus("news", limit=3, seed=None),
            METRICS,
            progress=False,
        )
    )
    jsonschema.validate(whole(found), SCHEMA)
    spike = found["spikes"][15]
    assert spike["ratio"] > 100
    assert 2 < spike["multiple"] < spike["ratio"]
    assert {(row["position"], row["token_type"]) for row in spike["where"]} == {
        (1, "all"),
        (None, "first"),
    }
    assert spike["spikes"] == 3
    assert spike["dimensions"][0]["share"] > 0.2


def test_of_images_without_attention_there_is_what_there_is():
    tables = measure(
        load_model("digits-resnet"),
        load_corpus("digits", limit=30, seed=None),
        "all",
        maps="positions",
        progress=False,
    )
    found = geometry_of(tables)
    jsonschema.validate(whole(found), SCHEMA)
    assert found["sinks"] is None
    assert "entropy" not in found["layers"][1]


def test_the_table_of_a_file_is_that_of_the_measurement(measured):
    keys = ["quantity", "of", "layer"]
    one, other = (
        t.set_index(keys).sort_index()
        for t in (headlines(measured), as_table(geometry_of(measured)))
    )
    assert one.equals(other[one.columns].astype(float))
    assert {*one.index.get_level_values("quantity")} == {*QUANTITIES}


def test_nothing_is_refused(measured):
    with pytest.raises(AnalysisError, match="give what measure returns"):
        geometry_of({})
