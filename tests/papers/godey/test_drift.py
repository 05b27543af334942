"""Drift against anisotropy: planted correlations are found, and too few layers say so."""

import itertools
import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import Planted, run_cells
from scipy import stats

from analysis_lib import AnalysisError
from analysis_lib.figures import verdict_table
from analysis_lib.measurement import Comparison
from analysis_lib.papers.godey.anisotropy import drift_correlation, permutation_p


def layers(model: str, norms: list[float], cosines: list[float]) -> pd.DataFrame:
    return pd.DataFrame({"model": model, "layer": range(len(norms)), "norm_of_mean": norms, "cosine": cosines})


def correlation(norms: list[float], cosines: list[float]) -> pd.Series:
    return drift_correlation(layers("m", norms, cosines)).iloc[0]


def test_a_monotonic_relation_is_perfect_for_ranks_alone():
    norms = [1.0, 2, 3, 4, 5, 6, 7]
    row = correlation(norms, [math.exp(norm) for norm in norms])
    assert row["spearman"] == pytest.approx(1)
    # Of 7! orders, only the rising and the falling one are as strong.
    assert row["spearman_p"] == pytest.approx(2 / math.factorial(7))
    assert row["pearson"] < 0.9
    assert row["enough"]
    assert row["note"] == "p over all 5,040 orders"
    falling = correlation(norms, norms[::-1])
    assert falling["spearman"] == pytest.approx(-1)
    assert falling["spearman_p"] == row["spearman_p"]


@pytest.mark.parametrize(("count", "enough"), [(3, False), (4, False), (5, True)])
def test_too_few_layers_cannot_be_significant(count, enough):
    values = [float(i) for i in range(count)]
    row = correlation(values, values)
    assert row["enough"] == enough
    assert row["spearman_p"] == pytest.approx(2 / math.factorial(count))
    assert (row["spearman_p"] < 0.05) == enough
    assert (row["note"] == "too few layers to say") != enough


@pytest.mark.parametrize("count", [1, 2])
def test_one_or_two_layers_have_no_correlation(count):
    row = correlation([1.0, 2.0][:count], [3.0, 4.0][:count])
    assert row[["spearman", "spearman_p", "pearson", "pearson_p"]].isna().all()
    assert row["note"] == "too few layers to say"


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.integers(0, 2**32 - 1), st.integers(3, 6), st.booleans())
def test_the_exact_p_counts_orders_with_and_without_ties(seed, count, ties):
    rng = np.random.default_rng(seed)
    x, y = rng.integers(0, 3, (2, count)).astype(float) if ties else rng.normal(size=(2, count))
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return
    observed = abs(stats.spearmanr(x, y).statistic)
    others = [abs(stats.spearmanr(x, order).statistic) for order in itertools.permutations(y)]
    expected = np.mean(np.array(others) >= observed - 1e-9)
    assert permutation_p(stats.rankdata(x), stats.rankdata(y)) == pytest.approx(expected)
    assert correlation(list(x), list(y))["spearman_p"] == pytest.approx(expected)


def test_ties_do_not_double_one_tail():
    # All six orders of (1, 1, 4): the outlier meets the 4 in two of them, and no order is as strong the other way.
    assert permutation_p(np.array([0.0, 0.0, 9.0]), np.array([1.0, 1.0, 4.0])) == pytest.approx(2 / 6)


def test_many_layers_use_the_t_approximation_and_pearson_is_scipy_s():
    rng = np.random.default_rng(1)
    norms = rng.normal(size=13)
    cosines = 0.5 * norms + rng.normal(size=13)
    row = correlation(list(norms), list(cosines))
    spearman, pearson = stats.spearmanr(norms, cosines), stats.pearsonr(norms, cosines)
    found = row[["spearman", "spearman_p", "pearson", "pearson_p"]].tolist()
    assert found == pytest.approx([*spearman, *pearson])
    assert row["note"] == "p from Student's t"


def test_a_constant_has_no_correlation():
    row = correlation([1.0, 2, 3, 4, 5], [0.3] * 5)
    assert row[["spearman", "spearman_p", "pearson", "pearson_p"]].isna().all()
    assert row["note"] == "the cosine is the same in every layer"
    assert correlation([2.0] * 5, [1.0, 2, 3, 4, 5])["note"] == "the drift is the same in every layer"


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
    ("norms", "cosines", "expected"),
    [
        ([1.0, 2, 3, 4, 5, 9], [0.1, 0.2, 0.3, 0.4, 0.5, 0.6], ["holds", "holds"]),
        ([1.0, 2, 3, 4, 5, 9], [0.3, 0.1, 0.5, 0.2, 0.4, 0.1], ["does not hold", "does not hold"]),
        # Too few layers, and a constant: nothing can be said.
        ([1.0, 2, 3, 4], [0.1, 0.2, 0.3, 0.4], ["undecided", "undecided"]),
        ([1.0, 2, 3, 4, 5], [0.1] * 5, ["undecided", "undecided"]),
    ],
)
def test_the_claim_on_drift_goes_by_the_p_value_alone(norms, cosines, expected):
    comparison = Comparison({("m", True): tables_of(norms, cosines)})
    names = {"comparison": comparison, "conv_models": [], "shipped_models": []}
    found = run_cells("anisotropy/drift", "def by_layer", "def significance", **names)["verdicts"]
    assert found["verdict"].tolist() == expected
    row = correlation(norms, cosines)
    if expected[0] != "undecided":
        assert found["value"].tolist() == pytest.approx([0.05 - row["spearman_p"], 0.05 - row["pearson_p"]])
    # A p-value has no interval, in the table of verdicts neither.
    assert found[["ci_low", "ci_high"]].isna().all(axis=None)
    assert "[" not in verdict_table(found, "tbl-x", "c").frame.iloc[0, 2]
