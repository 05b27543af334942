"""Drift against anisotropy: planted correlations are found, and too few layers say so."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from planted import Planted, run_cells
from scipy import stats

from analysis_lib import AnalysisError, Corpus, load_model, measure
from analysis_lib.papers.godey.anisotropy import Centred, drift_correlation, without_mean_of_others


def layers(model: str, norms: list[float], cosines: list[float]) -> pd.DataFrame:
    return pd.DataFrame({"model": model, "layer": range(len(norms)), "norm_of_mean": norms, "cosine": cosines})


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


def tables_of(norms: list[float], cosines: list[float]) -> Planted:
    """The tables of a model, with queries that do not belong to them."""

    def table(name: str, values: list[float]) -> pd.DataFrame:
        hidden = pd.DataFrame({"space": "hidden", "layer": range(len(values)), "head": pd.NA, name: values})
        return pd.concat([hidden, hidden.assign(space="query", head=1, **{name: 0.0})], ignore_index=True)

    return Planted(mean_vector=table("norm_of_mean", norms), anisotropy=table("cosine", cosines))


def by_layer(tables: Planted, *keys: str) -> pd.DataFrame:
    return run_cells("anisotropy/drift", "def by_layer")["by_layer"](tables, *keys)


def test_drift_by_layer_joins_the_hidden_states_alone():
    found = by_layer(tables_of([1.0, 2.0], [0.1, 0.2]))
    assert found[["layer", "norm_of_mean", "cosine"]].to_numpy().tolist() == [[0, 1, 0.1], [1, 2, 0.2]]


def test_the_share_of_the_drift_is_that_of_the_mean_norm():
    norms, cosines = [2.0, 2.0, 2.0, 2.0, 2.0], [0.1, 0.2, 0.3, 0.4, 0.5]
    trained = layers("m", norms, cosines).assign(mean_norm=[10.0, 5, 4, 3, 2])
    tables = {"mean_vector": trained.assign(space="hidden", trained=True)}
    names = {"trained": trained, "tables": tables, "correlations": drift_correlation(trained), "printed": str}
    found = run_cells("anisotropy/drift", 'columns = {"growth"', **names, display=lambda _: None)
    assert found["share"]["spearman"].tolist() == pytest.approx([1])
    assert found["columns"]["growth"].tolist() == [5]


def test_drift_by_layer_keeps_models_and_twins_apart():
    model, twin = tables_of([1.0, 2.0], [0.1, 0.2]), tables_of([3.0, 4.0], [0.3, 0.4])
    both = {
        name: pd.concat([model[name].assign(model="m", trained=True), twin[name].assign(model="m", trained=False)])
        for name in model
    }
    found = by_layer(both, "model", "trained")
    assert found["trained"].tolist() == [True, True, False, False]
    assert found["cosine"].tolist() == [0.1, 0.2, 0.3, 0.4]


@pytest.mark.parametrize(
    ("norms", "cosines", "expected", "contrary"),
    [
        ([1.0, 2, 3, 4, 5, 9], [0.1, 0.2, 0.3, 0.4, 0.5, 0.6], ["holds"] * 2, ["undecided", "does not hold"]),
        # The cosine falls as the drift grows: correlated, and no reason for the claim.
        ([9.0, 5, 4, 3, 2, 1], [0.1, 0.2, 0.3, 0.4, 0.5, 0.6], ["does not hold"] * 2, ["undecided", "does not hold"]),
        ([1.0, 2, 3, 4, 5, 9], [0.3, 0.1, 0.5, 0.2, 0.4, 0.1], ["undecided"] * 2, ["undecided"] * 2),
        # Too few layers, and a constant: nothing can be said.
        ([1.0, 2, 3], [0.1, 0.2, 0.3], ["undecided"] * 2, ["undecided"] * 2),
        ([1.0, 2, 3, 4, 5], [0.1] * 5, ["undecided"] * 2, ["undecided"] * 2),
    ],
)
def test_the_claims_on_drift_go_by_the_correlation_and_its_sign(norms, cosines, expected, contrary):
    for without, verdicts in (([], expected), (["m"], contrary)):
        names = {"correlations": drift_correlation(layers("m", norms, cosines)), "without": without}
        names |= {"apart": {}, "models": {}}
        cells = ("next_order = ", "for model, claim, *numbers")
        found = run_cells("anisotropy/drift", *cells, **names, display=lambda _: None)["verdicts"]
        assert found["verdict"].tolist() == verdicts
        assert found["id"].str.contains("no-drift").all() == bool(without)


def test_the_interval_of_pearsons_correlation_is_fishers():
    norms, cosines = [1.0, 2, 3, 4, 5, 9], [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    names = {"correlations": drift_correlation(layers("m", norms, cosines)), "without": []}
    names |= {"apart": {}, "models": {}}
    cells = ("next_order = ", "for model, claim, *numbers")
    found = run_cells("anisotropy/drift", *cells, **names, display=lambda _: None)["verdicts"]
    fisher = stats.pearsonr(norms, cosines).confidence_interval(0.95)
    row = found.set_index("id").loc["godey-drift-pearson"]
    assert (row["ci_low"], row["ci_high"]) == pytest.approx(tuple(fisher), abs=1e-4)


def hidden_states(model, texts) -> np.ndarray:
    """Of every layer, those of all tokens, by a plain forward pass per text."""
    states = []
    for text in texts:
        with torch.inference_mode():
            read = model.tokenizer(text, return_tensors="pt")
            states.append(torch.stack(model.model(**read, output_hidden_states=True).hidden_states)[:, 0])
    return torch.cat(states, 1).numpy()


def mean_cosine(vectors: np.ndarray) -> float:
    units = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return (units @ units.T)[~np.eye(len(units), dtype=bool)].mean()


def test_vectors_lose_the_mean_that_is_given(tiny_folder):
    corpus = Corpus("two", ["a warm film and a dull one", "the plot is lovely"])
    model = load_model(str(tiny_folder("bert")), dtype="float64")
    given = np.random.default_rng(0).normal(size=model.model.config.hidden_size)
    centred = Centred(dict.fromkeys(range(9), given))
    found = measure(model, corpus, [centred], progress=False)["centred"].set_index("layer")["cosine"]
    for layer, vectors in enumerate(hidden_states(model, corpus.texts) - given):
        assert found[layer] == pytest.approx(mean_cosine(vectors), abs=1e-9)


def test_one_half_loses_the_mean_of_the_other(tiny_folder):
    texts = ["a warm film", "the plot is lovely", "a dull one", "and a long one"]
    corpus, model = Corpus("four", texts), load_model(str(tiny_folder("bert")), dtype="float64")
    found = {
        name: table.set_index("layer") for name, table in without_mean_of_others(model, corpus, progress=False).items()
    }
    means = hidden_states(model, texts[0::2]).mean(1, keepdims=True)
    for layer, vectors in enumerate(hidden_states(model, texts[1::2])):
        hidden = found["anisotropy"].query("space == 'hidden'")["cosine"]
        assert hidden[layer] == pytest.approx(mean_cosine(vectors), abs=1e-9)
        assert found["centred"]["cosine"][layer] == pytest.approx(mean_cosine(vectors - means[layer]), abs=1e-9)


@pytest.mark.parametrize(("left", "expected"), [(0.01, "holds"), (0.3, "does not hold")])
def test_the_claim_on_vectors_without_their_mean(left, expected):
    tables = Planted(centred=pd.DataFrame({"space": "hidden", "layer": [0, 1], "cosine": [0.0, left]}), reach=0.001)
    tables.layers = pd.DataFrame({"layer": [0, 1], "width": [384, 384]})
    names = {"rows": [], "apart": {"m": tables}, "models": {"t": ["m"]}, "display": lambda _: None}
    (row,) = run_cells("anisotropy/drift", "for model, claim, *numbers", **names)["verdicts"].itertuples()
    assert (row.id, row.model, row.verdict) == ("godey-isotropic-without-mean", "m", expected)
