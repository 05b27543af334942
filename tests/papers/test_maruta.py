"""Outlier dimensions and attention: planted tables give the verdicts that were planted."""

import math

import numpy as np
import pandas as pd
import pytest
from planted import Planted, run_cells, verdicts_on_page

from analysis_lib.models import TOKEN_TYPES
from analysis_lib.papers import claims, maruta


def decided(page: str, tables: dict[str, pd.DataFrame]) -> list[str]:
    return verdicts_on_page(f"outliers/{page}", tables=Planted(tables))


def decided_of_the_first_token(tables: dict[str, pd.DataFrame]) -> list[str]:
    found = run_cells("outliers/first-token", "def numbers", tables=Planted(tables))["verdicts"]
    return found["verdict"].tolist()


def attention(weights: dict[str, list[float]]) -> pd.DataFrame:
    """An ``attention_by_token_type`` table of one head from a weight per type and layer."""
    return pd.DataFrame(
        [
            {"layer": layer, "head": 1, "key_type": kind, "mass": weight, "weight": weight}
            for kind, per_layer in weights.items()
            for layer, weight in enumerate(per_layer, 1)
        ]
    )


def test_attention_claims_hold_on_the_pattern_of_the_paper_and_fail_on_its_reverse():
    layers = range(1, 13)
    paper = {
        "cls": [0.4 if layer in (2, 3) else 0.1 for layer in layers],
        "sep": [0.5 if 5 <= layer <= 10 else 0.1 for layer in layers],
        "punct": [0.3 if layer > 10 else 0.05 for layer in layers],
        "other": [0.02] * 12,
    }
    assert decided("attention", {"attention_by_token_type": attention(paper)}) == ["holds"] * 3
    reverse = paper | {"other": [0.9] * 12, "punct": [0.3 if layer <= 10 else 0.05 for layer in layers]}
    assert decided("attention", {"attention_by_token_type": attention(reverse)}) == ["does not hold"] * 3


def contribution_tables(outlier: float, rest: float, sink: str = "sep") -> dict[str, pd.DataFrame]:
    """Twelve layers, two heads, four dimensions: dimension 3 is the outlier of every hidden layer.

    A key of the type ``sink`` gains ``outlier`` from dimension 3 and ``rest`` from dimension 0, other keys nothing.
    """
    gains = {(sink, 3): outlier, (sink, 0): rest, ("all", 3): outlier, ("all", 0): rest}
    rows = [
        (layer, head, dimension, kind, gains.get((kind, dimension), 0.0), 1)
        for layer in range(1, 13)
        for head in (1, 2)
        for kind in ("all", *TOKEN_TYPES)
        for dimension in range(4)
    ]
    columns = ["layer", "head", "dimension", "key_type", "contribution", "pairs"]
    contributions = pd.DataFrame(rows, columns=columns).astype({"key_type": "category"})
    outliers = pd.DataFrame({"layer": range(13), "dimension": 3, "mean": 9.0, "zscore": 9.0})
    weights = attention({"cls": [0.2] * 12, sink: [0.9] * 12, "punct": [0.1] * 12, "other": [0.1] * 12})
    # Dimension 3 is large at every token, dimension 0 at [SEP] alone.
    means = [
        (layer, d, kind, 9.0 if d == 3 or (d == 0 and kind == sink) else 0.1)
        for layer in range(13)
        for kind in ("all", *TOKEN_TYPES)
        for d in range(40)
    ]
    return {
        "dimension_means": pd.DataFrame(means, columns=["layer", "dimension", "token_type", "mean"]),
        "score_contributions": contributions,
        "outlier_dimensions": outliers,
        "attention_by_token_type": weights,
    }


def test_contribution_claims_follow_the_planted_dimension():
    dominated = contribution_tables(outlier=3.0, rest=1.0)
    gap = maruta.explained_gap(dominated)
    assert gap["key_type"].tolist() == ["sep"] * 12
    np.testing.assert_allclose(gap["gap"], 4.0)
    np.testing.assert_allclose(gap["share"], 0.75)
    # With the dimension that only [SEP] has, nothing is left to explain.
    np.testing.assert_allclose(gap["typed_share"], 1.0)
    assert gap["largest_dimension"].tolist() == [3] * 12
    np.testing.assert_allclose(gap["largest_share"], 0.75)
    assert maruta.explained_gap(dominated, "runner-up")["rival"].tolist() == ["cls"] * 12
    assert maruta.outlier_part(dominated)["heads"].tolist() == [1.0] * 12
    np.testing.assert_allclose(maruta.outlier_part(dominated)["share"], 0.75)
    # Layer 1 and the early layers are planted like all others, so the claims that set them apart fail.
    expected = ["does not hold", "holds", "does not hold", "holds", "holds"]
    assert decided("contributions", dominated) == expected
    spread = contribution_tables(outlier=1.0, rest=3.0)
    assert maruta.explained_gap(spread)["largest_dimension"].tolist() == [0] * 12
    expected = ["does not hold", "does not hold", "holds", "does not hold", "does not hold"]
    assert decided("contributions", spread) == expected
    # Where the outlier dimension adds little in layer 1 alone, that layer is set apart.
    table = dominated["score_contributions"]
    first = (table["layer"] == 1) & (table["dimension"] == 3)
    apart = dominated | {"score_contributions": table.assign(contribution=table["contribution"].mask(first, 0.1))}
    assert decided("contributions", apart)[0] == "holds"


def test_dimension_claims_follow_the_planted_dimension():
    width, layers = 20, range(4)
    means = {"all": 5.0, "cls": 9.0, "sep": 1.0, "punct": 1.0, "other": 2.0}
    rows = [
        (layer, dimension, kind, mean if dimension == 7 else 0.01 * (dimension % 3))
        for layer in layers
        for kind, mean in means.items()
        for dimension in range(width)
    ]
    table = pd.DataFrame(rows, columns=["layer", "dimension", "token_type", "mean"])
    found = pd.DataFrame({"layer": layers, "dimension": 7, "mean": 5.0, "zscore": 4.0})
    planted = Planted(dimension_means=table, outlier_dimensions=found)
    shown = run_cells("outliers/dimensions", "def type_distance", "statistics = {", tables=planted)["verdicts"]
    assert shown["verdict"].tolist() == ["holds", "holds"]
    # |mean| is 0.01 times 0, 1, 2 in nineteen dimensions and 5 in one: computed by hand in numpy.
    magnitudes = np.array([5.0 if d == 7 else 0.01 * (d % 3) for d in range(width)])
    zscore = (5 - magnitudes.mean()) / magnitudes.std()
    assert shown["value"].tolist() == pytest.approx([zscore, (9 - 2) / magnitudes.std()])
    # In the last layer nothing stands out any more.
    flat = table.assign(mean=table["mean"].where(table["layer"] < 3, 0.01 * (table["dimension"] % 3)))
    planted = Planted(dimension_means=flat, outlier_dimensions=found)
    verdicts = run_cells("outliers/dimensions", "def type_distance", "statistics = {", tables=planted)["verdicts"]
    assert verdicts["verdict"][0] == "does not hold"


def test_without_an_outlier_or_a_type_nothing_is_decided():
    tables = contribution_tables(outlier=3.0, rest=1.0)
    without = tables | {"outlier_dimensions": tables["outlier_dimensions"].head(0)}
    page = run_cells("outliers/dimensions", "def type_distance", tables=Planted(**tables))
    assert math.isnan(page["type_distance"](without))
    assert maruta.outlier_part(without)["heads"].tolist() == [0.0] * 12
    weights = attention({"cls": [0.2] * 12, "other": [0.1] * 12})
    found = decided("attention", {"attention_by_token_type": weights})
    assert found == ["holds", "undecided", "undecided"]


def test_published_table_is_complete_and_compares():
    paper = claims.published("maruta_table1_contributions")
    assert len(paper) == 6 * 4 * 12
    assert set(paper["key_type"]) == {*TOKEN_TYPES} - {"first"}
    ours = paper.rename(columns={"mean_contribution": "contribution"}).assign(pairs=1)
    ours["contribution"] += 0.5
    ours = ours.astype({"key_type": "category", "head": "Int64"}).sample(frac=1, random_state=0)
    tables = Planted()
    tables.run = {"model_revision": "google-bert/bert-base-uncased@0"}
    names = {"tables": tables, "contributions": ours, "keys": ["layer", "dimension", "key_type"]}
    beside = run_cells("outliers/contributions", "maruta_table1", **names)["beside"]
    np.testing.assert_allclose(beside["ours"] - beside["published"], 0.5)
    assert beside[["layer", "dimension", "key_type"]].equals(paper[["layer", "dimension", "key_type"]])


def test_layers_of_twelve_are_those_of_the_paper():
    assert maruta.named_layers(12) == {"early": [2, 3], "middle": [5, 6, 7, 8, 9, 10], "last": [11, 12]}


@pytest.mark.parametrize("depth", range(2, 49))
def test_layers_of_any_depth_exist_and_do_not_overlap(depth):
    early, middle, last = maruta.named_layers(depth).values()
    assert middle
    assert last
    assert middle[-1] + 1 == last[0]
    assert last[-1] == depth
    assert all(1 <= layer <= depth for layer in [*early, *middle, *last])


def test_claims_on_the_first_token_follow_the_planted_dimension():
    """Dimension 3 is an outlier over all tokens; dimension 0 is one at the first token alone."""
    tables = contribution_tables(outlier=3.0, rest=1.0, sink="first")
    assert decided_of_the_first_token(tables) == ["holds"] * 5
    apart = contribution_tables(outlier=1.0, rest=3.0, sink="first")
    assert decided_of_the_first_token(apart)[2:] == ["does not hold", "does not hold", "holds"]
    assert maruta.explained_gap(apart, preferred="first")["share"].tolist() == [0.25] * 12
    # Where another type is preferred, the gap remains that of the first token.
    away = {"attention_by_token_type": attention({"first": [0.2] * 12, "punct": [0.9] * 12, "other": [0.1] * 12})}
    expected = ["does not hold"] * 4 + ["holds"]
    assert decided_of_the_first_token(apart | away) == expected


def test_contributions_mark_the_largest_and_the_outliers_of_the_layer_that_is_read():
    values = {7: 4.0, 12: -2.0, 3: 0.5}
    rows = [(layer, head, d, "all", values.get(d, 0.01)) for layer in (1, 2) for head in (1, 2) for d in range(20)]
    table = pd.DataFrame(rows, columns=["layer", "head", "dimension", "key_type", "contribution"])
    planted = {"contributions": table, "outliers": pd.DataFrame({"layer": [0], "dimension": [7]}), "depth": 2}
    found = run_cells("outliers/contributions", "largest.drop_duplicates", "isin(shown)", **planted, shown=[1, 2])
    names = [[text.get_text() for text in axes.texts] for axes in found["grid"].axes.flat]
    # Dimension 7 is an outlier of hidden layer 0, which attention layer 1 reads; layer 2 reads layer 1.
    assert names == [["7*", "12", "3"], ["7", "12", "3"]]
    first, second = found["peaks"].query("layer == 1 and contribution == 4")["dimension"]
    assert second - first == pytest.approx(0.3)
    assert found["labels"] == ["1", "2"]
