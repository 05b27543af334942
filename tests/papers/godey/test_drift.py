"""Drift against anisotropy: planted correlations are found, and too few layers say so."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from planted import Planted, run_cells
from scipy import stats

from analysis_book.papers import claims
from analysis_book.papers.godey.anisotropy import (
    Centred,
    cosines,
    drift_correlation,
    follows_drift,
    without_mean_of_others,
)
from analysis_lib import AnalysisError, Comparison, Corpus, load_model, measure
from analysis_lib.metrics.intervals import Estimate


def layers(model: str, norms: list[float], cosines: list[float]) -> pd.DataFrame:
    return pd.DataFrame(
        {"model": model, "layer": range(len(norms)), "norm_of_mean": norms, "cosine": cosines}
    )


def correlation(norms: list[float], cosines: list[float]) -> pd.Series:
    return drift_correlation(layers("m", norms, cosines)).iloc[0]


def test_a_monotonic_relation_is_perfect_for_ranks_alone():
    norms = [1.0, 2, 3, 4, 5, 6, 7]
    row = correlation(norms, [math.exp(norm) for norm in norms])
    assert row["spearman"] == pytest.approx(1)
    assert row["spearman_p"] < 1e-6
    assert row["pearson"] < 0.9
    falling = correlation(norms, norms[::-1])
    assert falling["spearman"] == pytest.approx(-1)
    assert falling["spearman_p"] == row["spearman_p"]


@pytest.mark.parametrize("count", [1, 2])
def test_one_or_two_layers_have_no_correlation(count):
    row = correlation([1.0, 2.0][:count], [3.0, 4.0][:count])
    assert row[["spearman", "spearman_p", "pearson", "pearson_p"]].isna().all()


def test_both_correlations_are_scipy_s():
    rng = np.random.default_rng(1)
    norms = rng.normal(size=13)
    cosines = 0.5 * norms + rng.normal(size=13)
    row = correlation(list(norms), list(cosines))
    spearman, pearson = stats.spearmanr(norms, cosines), stats.pearsonr(norms, cosines)
    found = row[["spearman", "spearman_p", "pearson", "pearson_p"]].tolist()
    assert found == pytest.approx([*spearman, *pearson])


def test_a_constant_has_no_correlation():
    row = correlation([1.0, 2, 3, 4, 5], [0.3] * 5)
    assert row[["spearman", "spearman_p", "pearson", "pearson_p"]].isna().all()
    assert math.isnan(correlation([2.0] * 5, [1.0, 2, 3, 4, 5])["spearman"])


def test_models_keep_their_order_and_do_not_mix():
    rising, falling = [1.0, 2, 3, 4, 5, 6], [6.0, 5, 4, 3, 2, 1]
    table = pd.concat([layers("z", rising, rising), layers("a", rising, falling)])
    found = drift_correlation(table.sort_values("layer"))
    assert found["model"].tolist() == ["z", "a"]
    assert found["layers"].tolist() == [6, 6]
    assert found["spearman"].tolist() == pytest.approx([1, -1])


def test_what_cannot_be_correlated_is_refused():
    table = layers("m", [1.0, 2, 3], [1.0, 2, math.nan])
    with pytest.raises(AnalysisError, match="m has no finite drift and cosine in layer 2"):
        drift_correlation(table)


def measured(**models: tuple[list[float], list[float]]) -> Comparison:
    """Models with drift and cosine of their layers, vectors of length 10, and queries that no
    correlation may read.
    """
    runs = {}
    for model, (norms, similar) in models.items():
        hidden = pd.DataFrame({"space": "hidden", "layer": range(len(norms)), "head": pd.NA})
        tables = {}
        for name, table in (
            ("mean_vector", hidden.assign(norm_of_mean=norms, mean_norm=10.0)),
            ("anisotropy", hidden.assign(cosine=similar)),
        ):
            queries = table.assign(space="query", head=1)
            tables[name] = pd.concat([table, queries], ignore_index=True)
        sizes = pd.DataFrame({"layer": hidden["layer"], "stack": "", "width": 100})
        runs[model, None] = Planted(tables, layers=sizes)
    return Comparison(runs)


def on_page(without: list[str] = (), **models) -> dict:
    """What the cells of the page leave behind on planted models."""
    names = {
        "measured": measured(**models),
        "shipped_models": [],
        "without": without,
        "display": lambda _: None,
    }
    cells = (
        "tables = Comparison(",
        "of_share = ",
        "absent = ",
        "clear = ",
        'text = "Over the layers',
    )
    said = []
    names["Finding"] = lambda text, **_: said.append(text)
    return run_cells("anisotropy/drift", *cells, **names) | {"said": said}


def test_the_page_joins_the_hidden_states_of_each_model_alone():
    found = on_page(a=([1.0, 2, 3], [0.1, 0.2, 0.3]), b=([4.0, 6, 8], [0.4, 0.5, 0.7]))["layers"]
    assert found["model"].tolist() == ["a"] * 3 + ["b"] * 3
    assert found["cosine"].tolist() == [0.1, 0.2, 0.3, 0.4, 0.5, 0.7]
    assert found["share"].tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.6, 0.8])


RISING, FALLING, CROOKED = (
    [1.0, 2, 3, 4, 5, 9],
    [9.0, 5, 4, 3, 2, 1],
    [0.3, 0.1, 0.5, 0.2, 0.4, 0.1],
)
COSINES = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]


@pytest.mark.parametrize(
    ("norms", "cosines", "expected", "contrary"),
    [
        (RISING, COSINES, ["holds"] * 2, ["does not hold"] * 2),
        # The cosine falls as the drift grows: correlated, and no reason for the claim.
        (FALLING, COSINES, ["does not hold"] * 2, ["does not hold"] * 2),
        (RISING, CROOKED, ["does not hold"] * 2, ["holds"] * 2),
        # Too few layers and a constant have no correlation.
        ([1.0, 2, 3], [0.1, 0.2, 0.3], ["not applicable"] * 2, ["not applicable"] * 2),
        ([1.0, 2, 3, 4, 5], [0.1] * 5, ["not applicable"] * 2, ["not applicable"] * 2),
    ],
)
def test_the_claims_on_drift_go_by_the_correlation_and_its_sign(norms, cosines, expected, contrary):
    for without, verdicts in (([], expected), (["m"], contrary)):
        found = on_page(without, m=(norms, cosines))["verdicts"]
        assert found["verdict"].tolist() == verdicts
        assert found["id"].str.contains("no-drift").all() == bool(without)


def test_a_correlation_is_over_the_layers_with_its_interval_over_texts():
    """Thirty layers or six: their number makes no interval narrower."""
    for times in (1, 5):
        norms, cosines = np.tile(RISING, times), np.tile(COSINES, times)
        rows = on_page(m=(norms.tolist(), cosines.tolist()))["verdicts"].set_index("id")
        row = rows.loc["godey-drift-pearson"]
        assert row["value"] == pytest.approx(stats.pearsonr(RISING, COSINES).statistic)
        # As far as planted texts move it.
        assert row["ci_high"] - row["ci_low"] == pytest.approx(2e-9)


def test_ranks_that_no_text_changes_settle_a_claim():
    for value, side in ((0.9, "holds"), (-0.9, "does not hold")):
        (settled,) = follows_drift("spearman").judged([Estimate(value)])
        assert claims.judged("godey-drift-spearman", settled)["verdict"] == side
        assert claims.judged("godey-no-drift-spearman", settled)["verdict"] == (
            "does not hold" if value > 0 else "holds"
        )
    (nothing,) = follows_drift("spearman").judged([Estimate(math.nan)])
    assert claims.judged("godey-drift-spearman", nothing)["verdict"] == "not applicable"


def test_the_finding_names_who_grows_and_who_falls():
    found = on_page(["w"], m=(RISING, COSINES), w=(FALLING, COSINES))
    assert "norm of the mean in m, and falls in w. " in found["said"][0]
    assert "in **1** of 2 models" in found["said"][0]
    assert "no model" in on_page(m=(RISING, CROOKED))["said"][0]


def hidden_states(model, texts) -> np.ndarray:
    """Of every layer, those of all tokens, by a plain forward pass per text."""
    states = []
    for text in texts:
        with torch.inference_mode():
            read = model.tokenizer(text, return_tensors="pt")
            states.append(
                torch.stack(model.model(**read, output_hidden_states=True).hidden_states)[:, 0]
            )
    return torch.cat(states, 1).numpy()


def mean_cosine(vectors: np.ndarray) -> float:
    units = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return (units @ units.T)[~np.eye(len(units), dtype=bool)].mean()


def test_vectors_lose_the_mean_that_is_given(tiny_folder):
    corpus = Corpus("two", ["a warm film and a dull one", "the plot is lovely"])
    model = load_model(str(tiny_folder("bert")), dtype="float64")
    given = np.random.default_rng(0).normal(size=model.model.config.hidden_size)
    centred = Centred(dict.fromkeys(range(9), given))
    found = measure(model, corpus, [centred], progress=False)["centred"].set_index("layer")[
        "cosine"
    ]
    for layer, vectors in enumerate(hidden_states(model, corpus.texts) - given):
        assert found[layer] == pytest.approx(mean_cosine(vectors), abs=1e-9)


def test_one_half_loses_the_mean_of_the_other(tiny_folder):
    texts = ["a warm film", "the plot is lovely", "a dull one", "and a long one"]
    corpus, model = Corpus("four", texts), load_model(str(tiny_folder("bert")), dtype="float64")
    found = {
        name: table.set_index("layer")
        for name, table in without_mean_of_others(model, corpus, progress=False).items()
    }
    means = hidden_states(model, texts[0::2]).mean(1, keepdims=True)
    for layer, vectors in enumerate(hidden_states(model, texts[1::2])):
        hidden = found["anisotropy"].query("space == 'hidden'")["cosine"]
        assert hidden[layer] == pytest.approx(mean_cosine(vectors), abs=1e-9)
        assert found["centred"]["cosine"][layer] == pytest.approx(
            mean_cosine(vectors - means[layer]), abs=1e-9
        )


def test_the_first_token_can_be_passed_over(tiny_folder):
    texts = ["a warm film", "the plot is lovely", "a dull one", "and a long one"]
    corpus, model = Corpus("four", texts), load_model(str(tiny_folder("bert")), dtype="float64")
    found = without_mean_of_others(model, corpus, progress=False)
    others, half = (
        [hidden_states(model, [text])[:, 1:] for text in texts[turn::2]] for turn in (0, 1)
    )
    means = np.concatenate(others, 1).mean(1, keepdims=True)
    for layer, vectors in enumerate(np.concatenate(half, 1)):
        for name, left in (("anisotropy", vectors), ("centred", vectors - means[layer])):
            assert cosines(found, f"{name}_without_first")[layer] == pytest.approx(
                mean_cosine(left), abs=1e-9
            )


def apart(
    as_it_is: list[float], left: list[float], without_first: list[float], reach: float = 0.001
) -> Planted:
    """The tables of a model of 384 dimensions, in which 95 % of random pairs have a cosine below
    0.084.
    """
    values = {"anisotropy": as_it_is, "centred": left}
    values |= {"anisotropy_without_first": as_it_is, "centred_without_first": without_first}
    hidden = pd.DataFrame({"space": "hidden", "layer": range(len(left))})
    tables = {name: hidden.assign(cosine=cosine) for name, cosine in values.items()}
    return Planted(tables, reach, hidden[["layer"]].assign(width=384))


@pytest.mark.parametrize(
    ("left", "without_first", "expected"),
    [
        ([0.0, 0.01, 0.0], [0.0, 0.01, 0.0], ["holds"] * 4),
        # One layer keeps its cone, two of three have lost it.
        ([0.5, 0.01, 0.0], [0.5, 0.01, 0.0], ["does not hold", "holds"] * 2),
        # What is left with all tokens is gone without the first ones.
        ([0.0, 0.4, 0.4], [0.0, 0.01, 0.0], ["does not hold"] * 2 + ["holds"] * 2),
        # Vectors that point away from each other are no isotropic cloud's, but less alike than
        # one's.
        ([0.0, -0.4, -0.4], [0.0, 0.01, 0.0], ["holds", "does not hold", "holds", "holds"]),
    ],
)
def test_the_claims_on_vectors_without_their_mean(left, without_first, expected):
    names = {"apart": {"m": apart([0.2, 0.6, 0.5], left, without_first)}, "display": lambda _: None}
    found = run_cells("anisotropy/centred", "def statistics", "names = {", "read = {", **names)[
        "verdicts"
    ]
    assert found["verdict"].tolist() == expected
    assert found["id"].tolist() == ["godey-isotropic-without-mean", "godey-mean-makes-cone"] * 2
    assert found["variant"].tolist() == ["all tokens"] * 2 + ["without the first token"] * 2


def test_the_finding_on_centred_vectors_gives_the_reason_where_it_is_one():
    models = {"clean": apart([0.2, 0.6], [0.0, 0.01], [0.0, 0.01])}
    models["sunk"] = apart([0.2, 0.6], [0.0, 0.8], [0.0, 0.02])
    said = []
    names = {
        "apart": models,
        "corpus": [],
        "display": lambda _: None,
        "Finding": lambda text, **_: said.append(text),
    }
    cells = (
        "names = {",
        "groups = wide",
        "def statistics",
        "read = {",
        "clear = ",
        'text = f"Without the mean',
    )
    run_cells("anisotropy/centred", *cells, **names)
    assert said[0].startswith(
        "Without the mean of other texts, clean is isotropic in every layer. sunk keeps"
    )
    assert "**0.80**, and **0.02** without the first tokens: far longer" in said[0]
    said.clear()
    names["apart"] = {"clean": models["clean"]}
    run_cells("anisotropy/centred", *cells, **names)
    assert said[0].endswith("clean keeps a cosine of **0.01**.")


def test_layers_beyond_random_directions_are_counted_by_their_own_width():
    hidden = {
        "model": ["m"] * 4,
        "trained": [True, True, False, False],
        "width": [100, 10_000] * 2,
        "space": "hidden",
    }
    names = {
        "hidden": pd.DataFrame(hidden | {"cosine": [0.1, 0.1, 0.2, 0.0]}),
        "display": lambda _: None,
    }
    found = run_cells("anisotropy/isotropy", "weights = hidden", 'shown["beyond"]', **names)
    # The 95th percentile is 0.165 in 100 dimensions and 0.017 in 10,000.
    assert found["shown"]["beyond"].tolist() == [False, True, True, False]
    assert found["table"].iloc[0].tolist() == ["m", "1 of 2", "1 of 2"]


def test_the_correlations_of_twins_are_one_for_each_draw():
    norms, cosines = (
        [1.0, 2, 3, 4],
        {None: [0.1, 0.2, 0.3, 0.4], 0: [0.4, 0.3, 0.2, 0.1], 1: [0.1, 0.3, 0.2, 0.4]},
    )
    table = pd.concat(
        layers("m", norms, found).assign(trained=t is None, twin=t) for t, found in cosines.items()
    )
    found = run_cells("anisotropy/checks", "draws = layers", layers=table, display=lambda _: None)[
        "listed"
    ]
    assert found.iloc[0, 2:].tolist() == pytest.approx([1, -1, -0.1, 0.8])
