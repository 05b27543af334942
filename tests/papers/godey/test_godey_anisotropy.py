"""Anisotropy of trained models and their twins: planted cosines give the verdicts that were planted."""

import numpy as np
import pandas as pd
import pytest
from planted import Planted, run_cells, verdicts_of

from analysis_lib.measurement import Comparison
from analysis_lib.metrics.anisotropy import isotropic_cosine_quantile
from analysis_lib.papers import claims
from analysis_lib.papers.godey import anisotropy

# The cells of the page on convolutional networks that judge.
NETWORKS = ("loose = ", "def statistics", "by_model(comparison,")


def hidden(*cosines: float, reach: float = 0.01) -> pd.DataFrame:
    """An ``anisotropy`` table of these layers, and of queries that no claim on hidden states may read."""
    layers = pd.DataFrame({"space": "hidden", "layer": range(len(cosines)), "cosine": cosines})
    table = pd.concat([layers, layers.assign(space="query", cosine=0.99 * (-1) ** layers["layer"])])
    return table.assign(ci_low=table["cosine"] - reach, ci_high=table["cosine"] + reach)


def excess(*widths: int):
    return {"godey-anisotropic-layer": lambda t: anisotropy.isotropic_excess(t, dict(enumerate(widths)))}


def test_each_layer_is_held_to_the_percentile_of_its_own_width():
    # The 95th percentile is 0.165 in 100 dimensions and 0.017 in 10,000.
    table = hidden(0.1, 0.1)
    assert verdicts_of(excess(100, 100), anisotropy=table) == ["does not hold"]
    assert verdicts_of(excess(100, 100), anisotropy=hidden(0.1, 0.2)) == ["holds"]
    assert verdicts_of(excess(100, 10_000), anisotropy=table) == ["holds"]
    widths = pd.Series([100, 10_000], dtype="Int64")  # As they stand in a table of layers.
    found = anisotropy.isotropic_excess({"anisotropy": table}, widths)
    assert found == pytest.approx(0.1 - isotropic_cosine_quantile(10_000))


def measured(*cosines: float, decoder: int = 0) -> Planted:
    """The tables of a model ``m`` whose layers have 100 dimensions, and the last of which are those of a decoder."""
    tables = Planted(anisotropy=hidden(*cosines))
    stacks = [*["encoder"] * (len(cosines) - decoder), *["decoder"] * decoder]
    tables.layers = pd.DataFrame({"layer": range(len(cosines)), "width": 100, "stack": stacks})
    tables.run = {"model": "m"}
    return tables


def on_page(page: str, *cosines: float, speech: bool = True) -> pd.Series:
    """The verdicts of a page on one model, which has no batch normalisation, by the id of the claim."""
    names = {"conv_models": ["m"], "speech_models": ["m"] if speech else [], "display": lambda _: None}
    names |= {"comparison": Comparison({("m", None): measured(*cosines)}), "normalised": {"m": False}}
    names |= {"apart": {}, "image_data": "images", "models": {"images": ["m"]}}
    markers = NETWORKS if page == "convolution" else ("def statistics", "by_model(comparison,")
    found = run_cells(f"anisotropy/{page}", *markers, **names)["verdicts"]
    return found.set_index("id")["verdict"]


def test_small_models_join_no_verdict_and_shipped_ones_bring_theirs(monkeypatch):
    estimates = {"godey-anisotropic-layer": (0.4, 0.3, 0.5), "maruta-persistent-outlier": (1.0, 1.0, 1.0)}
    monkeypatch.setattr(claims, "recorded", lambda _: claims.verdicts_of_estimates(estimates).assign(model="far"))
    comparison = Comparison({("real", None): measured(0.1, 0.1), ("toy", None): measured(0.1, 0.9)})
    names = {"comparison": comparison, "controlled": ["toy"], "shipped_models": ["far"]}
    found = run_cells("anisotropy/text", "def statistics", "by_model(Comparison(", **names)["verdicts"]
    assert dict(zip(found["model"], found["verdict"], strict=True)) == {
        "real": "does not hold",
        "far (shipped)": "holds",
    }


@pytest.mark.parametrize(("last", "expected"), [(0.81, "holds"), (0.79, "does not hold")])
def test_the_decoder_alone_decides_the_claim_on_decoders(last, expected):
    comparison = Comparison({("m", None): measured(0.95, 0.5, last, decoder=2)})
    names = {"comparison": comparison, "controlled": [], "shipped_models": []}
    found = run_cells("anisotropy/text", "def statistics", "by_model(Comparison(", **names)["verdicts"]
    assert found.set_index("id")["verdict"]["godey-decoder-extreme"] == expected


def test_models_of_bytes_are_set_against_the_mean_peak_of_the_others():
    peaks = {"low": 0.2, "high": 0.6, "bytes": 0.45, "canine": 0.35}
    runs = Comparison({(name, None): measured(0.0, peak) for name, peak in peaks.items()})
    names = {"comparison": runs, "text_models": ["low", "high"], "character_models": ["bytes", "canine"]}
    cells = ("def statistics", "def higher")
    rows = pd.concat(run_cells("anisotropy/text", *cells, display=lambda _: None, **names)["bytewise"])
    assert rows[["model", "verdict"]].to_numpy().tolist() == [["bytes", "holds"], ["canine", "does not hold"]]
    np.testing.assert_allclose(rows["value"], [0.05, -0.05])
    without = run_cells("anisotropy/text", *cells, display=lambda _: None, **names | {"character_models": []})
    assert without["bytewise"] == []


@pytest.mark.parametrize(("least", "expected"), [(0.21, "holds"), (0.19, "does not hold")])
def test_one_layer_decides_the_claim_on_speech(least, expected):
    found = on_page("speech-and-vision", 0.9, least, 0.5)
    assert found.to_dict() == {"godey-anisotropic-layer": "holds", "godey-speech-cosine": expected}


@pytest.mark.parametrize(("largest", "expected"), [(0.19, "holds"), (0.21, "does not hold")])
def test_one_layer_decides_the_claim_on_vision(largest, expected):
    assert on_page("speech-and-vision", 0.1, largest, 0.15, speech=False)["godey-vision-low"] == expected


@pytest.mark.parametrize(("largest", "expected"), [(0.16, "holds"), (0.17, "does not hold")])
def test_a_vision_transformer_is_isotropic_where_no_layer_is_anisotropic(largest, expected):
    found = on_page("speech-and-vision", 0.1, largest, 0.15, speech=False)
    assert found["godey-vision-isotropic"] == expected
    assert found["godey-anisotropic-layer"] != expected


@pytest.mark.parametrize(
    ("cosines", "expected"),
    [
        ((0.0, 0.1), ["holds", "holds"]),
        ((0.0, 0.18), ["does not hold", "holds"]),
        ((0.0, 0.3), ["does not hold", "does not hold"]),
    ],
)
def test_convolutions_are_isotropic_strictly_or_loosely(cosines, expected):
    found = on_page("convolution", *cosines)
    assert found[["godey-convolution-strict", "godey-convolution-loose"]].tolist() == expected
    assert found["godey-without-batch-norm"] == found["godey-convolution-loose"]


@pytest.mark.parametrize(
    ("cosines", "expected"), [((0.6, 0.4, 0.5, 0.1), "holds"), ((0.1, 0.5, 0.4, 0.6), "does not hold")]
)
def test_depth_and_cosine_are_compared_by_rank(cosines, expected):
    assert on_page("convolution", *cosines)["godey-convolution-deeper"] == expected


def test_only_networks_without_batch_normalisation_speak_for_those_without():
    comparison = Comparison({("m", None): measured(0.0, 0.1)})
    names = {"conv_models": ["m"], "comparison": comparison, "normalised": {"m": True}, "display": lambda _: None}
    names |= {"apart": {}, "image_data": "images"}
    found = run_cells("anisotropy/convolution", *NETWORKS, **names)["verdicts"]
    assert "godey-without-batch-norm" not in set(found["id"])


@pytest.mark.parametrize(("left", "expected"), [(0.1, "holds"), (0.3, "does not hold")])
def test_a_network_is_judged_without_the_mean_map_too(left, expected):
    centred = Planted(centred=pd.DataFrame({"space": "hidden", "layer": [0, 1], "cosine": [0.0, left]}))
    names = {"conv_models": ["m"], "comparison": Comparison({("m", None): measured(0.0, 0.9)})}
    names |= {"normalised": {"m": True}, "apart": {"m": centred}, "image_data": "images", "display": lambda _: None}
    found = run_cells("anisotropy/convolution", *NETWORKS, **names)["verdicts"].set_index("id")["verdict"]
    assert found["godey-convolution-centred"] == expected
    assert found["godey-convolution-loose"] == "does not hold"


def test_training_effect_counts_layers_and_names_the_one_that_changes_most():
    runs = {
        ("up", None): hidden(0.1, 0.5, 0.3, 0.2, reach=0.03),
        **{("up", i): hidden(0.2, 0.1, 0.28, 0.1, reach=0.04) for i in range(5)},
        ("down", None): hidden(0.1, 0.2, reach=0.0),
        **{("down", i): hidden(0.15, 0.9, reach=0.0) for i in range(5)},
        ("alone", None): hidden(0.5),
    }
    table = pd.concat(rows.assign(model=model, trained=twin is None, twin=twin) for (model, twin), rows in runs.items())
    table = table[table["space"] == "hidden"]
    found = anisotropy.training_effect(table).set_index("model")
    assert found.index.tolist() == ["up", "down"]
    assert found[["layers", "more", "less"]].to_numpy().tolist() == [[4, 2, 1], [2, 0, 2]]
    assert found["layer"].tolist() == [1, 1]
    np.testing.assert_allclose(found["difference"], [0.4, -0.7])
    assert found.loc["up", ["trained", "untrained"]].tolist() == [0.5, 0.1]
    # A right angle with sides 3 and 4.
    np.testing.assert_allclose(found.loc["up", ["ci_low", "ci_high"]].astype(float), [0.35, 0.45])
    without = anisotropy.training_effect(table[table["trained"]])
    assert without.empty
    assert without.columns.tolist() == ["model", *found.columns]


def test_what_training_changes_is_judged_against_the_spread_of_twins():
    """Twins at 0.1, 0.2, ..., 0.5: their mean is 0.3, and Student's interval reaches 0.196 from it."""

    def effect(twins: int) -> pd.Series:
        parts = [hidden(0.45, reach=0.0).assign(trained=True, twin=None)]
        parts += [hidden(0.1 * (i + 1), reach=0.0).assign(trained=False, twin=i) for i in range(twins)]
        table = pd.concat(parts).assign(model="m").query("space == 'hidden'")
        return anisotropy.training_effect(table).iloc[0]

    five = effect(5)
    assert (five["untrained"], five["difference"]) == pytest.approx((0.3, 0.15))
    assert five["ci_low"] == pytest.approx(0.15 - 0.19632, abs=1e-5)
    assert (five["more"], five["less"]) == (0, 0)
    # One twin, or four, say how far apart two numbers are, and no more.
    assert np.isnan(effect(1)["ci_low"])
    assert np.isnan(effect(4)["ci_low"])
    assert effect(1)["more"] == 0
