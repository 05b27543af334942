"""Numbers of several seeds: claims on tables in which we know whether they hold, and the published numbers beside."""

import numpy as np
import pandas as pd
import pytest
from fosse_cells import run_cells

from analysis_lib.papers.claims import FAILS, HOLDS, UNDECIDED, beside_published

SEEDS = (0, 1, 2)


def rows(dataset, quantity, value, layers=1, layer=1, weight=0.0, wobble=0.001):
    """A number of every seed, a little apart."""
    about = {"dataset": dataset, "layers": layers, "entropy_weight": weight, "quantity": quantity, "layer": layer}
    return [{**about, "seed": seed, "value": value + wobble * (seed - 1)} for seed in SEEDS]


def table(*parts) -> pd.DataFrame:
    return pd.DataFrame([row for part in parts for row in part]).astype({"layer": "Int64"})


def judged(page: str, *marks: str, found: pd.DataFrame, **names) -> pd.DataFrame:
    """The verdicts of a page on the models that it trains."""
    verdicts = run_cells(page, *marks, found=found, display=lambda _: None, **names)["verdicts"]
    return verdicts[verdicts["run"] == "here"].set_index("id")


def of_depth(found: pd.DataFrame) -> pd.DataFrame:
    first = found.query("quantity == 'key' and layers == 1").assign(dataset="hatexplain")
    return judged("keys-and-values", "growth = ", "verdicts = ", found=found, full=found, first=first)


KEYS = (rows("a", "key", 0.5, 1, 1), rows("a", "key", 0.4, 2, 1), rows("a", "key", 0.8, 2, 2))


def test_depth_makes_keys_alike_and_values_not():
    values = rows("a", "value", 0.6, 1, 1), rows("a", "value", 0.7, 2, 1), rows("a", "value", 0.3, 2, 2)
    found = of_depth(table(*KEYS, *values))
    assert found["value"].tolist() == pytest.approx([0.4, 0.3, -0.4, -0.3])
    assert found["verdict"].tolist() == [HOLDS, HOLDS, FAILS, FAILS]
    assert set(found["dataset"]) == {"a"}
    # Seeds wobble alike in both layers: their difference is the same in each.
    assert found.loc["fosse-keys-last-layer", "ci_low"] == pytest.approx(0.4)


def test_one_seed_decides_nothing():
    keys = table(*KEYS)
    both = pd.concat([keys, keys.assign(quantity="value")])
    assert set(of_depth(both[both["seed"] == 0])["verdict"]) == {UNDECIDED}


WEIGHTS = (0.0, 0.01, 0.1)


def regularised(entropy, key, value, norm, accuracy) -> pd.DataFrame:
    names = ("entropy", "key", "value", "key_norm", "accuracy")
    quantities = zip(names, (entropy, key, value, norm, accuracy), strict=True)
    return table(*(rows("a", name, v, weight=w) for name, vs in quantities for w, v in zip(WEIGHTS, vs, strict=True)))


def sparse_only(found: pd.DataFrame) -> pd.DataFrame:
    return judged("entropy", "most / none", "still_open", found=found, full=found, small=found)


def test_the_claims_on_entropy_hold_where_they_should():
    found = sparse_only(
        regularised((0.99, 0.5, 0.1), (0.7, 0.7, 0.6), (0.5, 0.7, 0.9), (1.0, 5.0, 20.0), (0.65, 0.65, 0.64))
    )
    assert set(found["verdict"]) == {HOLDS}
    expected = [1 - 0.1 / 0.99, 1.0, 0.6 / 0.7, 20.0, np.log(20.0) - np.log(0.7 / 0.6), -0.01]
    assert found["value"].tolist() == pytest.approx(expected, rel=2e-3)


def test_values_that_a_weight_does_not_change_have_no_trend(recwarn):
    numbers = regularised((0.99, 0.99, 0.99), (0.7, 0.7, 0.7), (0.5, 0.5, 0.5), (1.0, 1.0, 1.0), (0.65, 0.65, 0.65))
    same = numbers.assign(value=numbers["value"].round(2))
    assert sparse_only(same).loc["fosse-values-converge", "value"] == 0
    assert not recwarn


def test_the_claims_on_sparse_attention_fail_where_they_should():
    found = sparse_only(
        regularised((0.9, 0.6, 0.5), (0.7, 0.3, 0.1), (0.9, 0.7, 0.5), (2.0, 1.5, 1.0), (0.65, 0.6, 0.5))
    )
    assert found["verdict"].tolist() == [HOLDS, *5 * [FAILS]]


def test_attention_that_stays_uniform_says_nothing_of_sparse_attention():
    found = sparse_only(
        regularised((0.95, 0.96, 0.97), (0.7, 0.7, 0.7), (0.9, 0.8, 0.7), (2.0, 2.5, 3.0), (0.65, 0.65, 0.65))
    )
    assert found["verdict"].tolist() == [FAILS, *5 * [UNDECIDED]]
    assert found["ci_low"].isna().tolist() == [False, *5 * [True]]


def test_training_that_makes_values_less_alike_does_not_build_their_convergence():
    def stage(name, key, value):
        found = table(rows("hatexplain", "key", key), rows("hatexplain", "value", value))
        return found.assign(stage=name, variant="as here")

    both = pd.concat([stage("untrained", 0.2, 0.9), stage("trained", 0.5, 0.6)])
    found = judged("sensitivity", "gain = ", found=both, full=both)
    assert set(found["variant"]) == {"as here"}
    assert found["value"].tolist() == pytest.approx([0.3, -0.3])
    assert found["verdict"].tolist() == [HOLDS, FAILS]


def test_published_numbers_stand_beside_ours_in_units_of_the_spread():
    found = pd.DataFrame({"layer": [1, 1, 1, 2, 2], "quantity": "key", "value": [0.2, 0.4, 0.6, 0.5, 0.5]})
    printed = pd.DataFrame({"layer": [1, 2], "quantity": "key", "published": [0.8, 0.4]})
    both = beside_published(found, printed, ["layer", "quantity"]).set_index("layer")
    assert both.loc[1, ["mean", "spread over seeds", "published"]].tolist() == pytest.approx([0.4, 0.2, 0.8])
    # Numbers without a spread have no distance in spreads.
    assert both["difference in spreads"].tolist() == ["-2.0", "–"]
