"""The claims of Fosse et al. (2023), sections 2.2 and 4, on tables in which we know whether they hold."""

import numpy as np
import pandas as pd
import pytest

from analysis_lib import papers
from analysis_lib.papers.old_claims import FAILS, HOLDS, UNDECIDED

SEEDS = (0, 1, 2)


def rows(dataset, quantity, value, layers=1, layer=1, weight=0.0, wobble=0.001):
    """A number of every seed, a little apart."""
    return [
        {
            "dataset": dataset,
            "layers": layers,
            "entropy_weight": weight,
            "seed": seed,
            "quantity": quantity,
            "layer": layer,
            "value": value + wobble * (seed - 1),
        }
        for seed in SEEDS
    ]


def table(*parts) -> pd.DataFrame:
    return pd.DataFrame([row for part in parts for row in part]).astype({"layer": "Int64"})


def by_claim(found: pd.DataFrame, words: str) -> pd.Series:
    (row,) = [row for _, row in found.iterrows() if words in row["claim"]]
    return row


@pytest.mark.parametrize(("accuracy", "verdict"), [(0.60, HOLDS), (0.66, HOLDS), (0.57, FAILS)])
def test_an_accuracy_may_lie_three_points_below_the_published_one(accuracy, verdict):
    found = papers.fosse_accuracy_verdicts(table(rows("hatexplain", "accuracy", accuracy, layer=pd.NA)))
    (row,) = found.itertuples()
    assert (row.dataset, row.verdict) == ("hatexplain", verdict)
    assert row.bound == pytest.approx(0.581)
    assert row.value == pytest.approx(accuracy)


def test_a_corpus_that_the_paper_lacks_has_no_published_accuracy():
    assert papers.fosse_accuracy_verdicts(table(rows("reviews", "accuracy", 0.7, layer=pd.NA))).empty


def test_depth_makes_keys_alike_and_values_not():
    found = papers.fosse_depth_verdicts(
        table(
            rows("a", "key", 0.5, 1, 1),
            rows("a", "key", 0.4, 2, 1),
            rows("a", "key", 0.8, 2, 2),
            rows("a", "value", 0.6, 1, 1),
            rows("a", "value", 0.7, 2, 1),
            rows("a", "value", 0.3, 2, 2),
        )
    )
    assert by_claim(found, "Keys are more alike")[["value", "verdict"]].tolist() == [pytest.approx(0.4), HOLDS]
    assert by_claim(found, "Keys of the last layer")[["value", "verdict"]].tolist() == [pytest.approx(0.3), HOLDS]
    assert by_claim(found, "Values are more alike")[["value", "verdict"]].tolist() == [pytest.approx(-0.4), FAILS]
    assert by_claim(found, "Values of the last layer")[["value", "verdict"]].tolist() == [pytest.approx(-0.3), FAILS]
    # Seeds wobble alike in both layers: their difference is the same in each.
    assert by_claim(found, "Keys are more alike")["ci_low"] == pytest.approx(0.4)


def test_one_seed_decides_nothing():
    found = table(rows("a", "key", 0.5, 1, 1), rows("a", "key", 0.4, 2, 1), rows("a", "key", 0.8, 2, 2))
    values = found.assign(quantity="value")
    both = pd.concat([found, values])
    assert set(papers.fosse_depth_verdicts(both[both["seed"] == 0])["verdict"]) == {UNDECIDED}


WEIGHTS = (0.0, 0.01, 0.1)


def regularised(entropy, key, value, norm, accuracy) -> pd.DataFrame:
    names = ("entropy", "key", "value", "key_norm", "accuracy")
    quantities = zip(names, (entropy, key, value, norm, accuracy), strict=True)
    return table(*(rows("a", name, v, weight=w) for name, of in quantities for w, v in zip(WEIGHTS, of, strict=True)))


def test_the_claims_on_entropy_hold_where_they_should():
    found = papers.fosse_entropy_verdicts(
        regularised((0.99, 0.5, 0.1), (0.7, 0.7, 0.6), (0.5, 0.7, 0.9), (1.0, 5.0, 20.0), (0.65, 0.65, 0.64))
    )
    assert set(found["verdict"]) == {HOLDS}
    assert by_claim(found, "entropy of attention falls")["value"] == pytest.approx(1 - 0.1 / 0.99, abs=1e-4)
    assert by_claim(found, "Values grow")["value"] == pytest.approx(1.0)
    assert by_claim(found, "orthogonal")["value"] == pytest.approx(0.6 / 0.7, abs=1e-4)
    assert by_claim(found, "norm of the keys")["value"] == pytest.approx(20.0, rel=1e-3)
    assert by_claim(found, "direction")["value"] == pytest.approx(np.log(20.0) - np.log(0.7 / 0.6), abs=1e-3)
    assert by_claim(found, "no accuracy")["value"] == pytest.approx(-0.01)


def test_values_that_a_weight_does_not_change_have_no_trend(recwarn):
    numbers = regularised((0.99, 0.99, 0.99), (0.7, 0.7, 0.7), (0.5, 0.5, 0.5), (1.0, 1.0, 1.0), (0.65, 0.65, 0.65))
    same = numbers.assign(value=numbers["value"].round(2))
    assert by_claim(papers.fosse_entropy_verdicts(same), "Values grow")["value"] == 0
    assert not recwarn


def test_the_claims_on_sparse_attention_fail_where_they_should():
    found = papers.fosse_entropy_verdicts(
        regularised((0.9, 0.6, 0.5), (0.7, 0.3, 0.1), (0.9, 0.7, 0.5), (2.0, 1.5, 1.0), (0.65, 0.6, 0.5))
    )
    assert by_claim(found, "entropy of attention falls")["verdict"] == HOLDS
    assert set(found["verdict"][1:]) == {FAILS}


def test_attention_that_stays_uniform_says_nothing_of_sparse_attention():
    found = papers.fosse_entropy_verdicts(
        regularised((0.95, 0.96, 0.97), (0.7, 0.7, 0.7), (0.9, 0.8, 0.7), (2.0, 2.5, 3.0), (0.65, 0.65, 0.65))
    )
    assert found["verdict"].tolist() == [FAILS, *5 * [UNDECIDED]]
    assert found["ci_low"].isna().tolist() == [False, *5 * [True]]


def test_training_that_makes_values_less_alike_does_not_build_their_convergence():
    def stage(name, key, value):
        found = table(rows("hatexplain", "key", key), rows("hatexplain", "value", value))
        return found.assign(stage=name, variant="as here").drop(columns="dataset")

    found = papers.fosse_sensitivity_verdicts(pd.concat([stage("untrained", 0.2, 0.9), stage("trained", 0.5, 0.6)]))
    assert set(found["variant"]) == {"as here"}
    assert by_claim(found, "keys")[["value", "verdict"]].tolist() == [pytest.approx(0.3), HOLDS]
    assert by_claim(found, "values")[["value", "verdict"]].tolist() == [pytest.approx(-0.3), FAILS]


def test_published_tables_have_the_printed_numbers():
    depths = papers.published_depths().set_index(["dataset", "quantity", "layers", "layer"])["published"]
    assert len(depths) == 2 * (15 + 15 + 3)
    assert depths["yelphat", "value", 5, 4] == 0.9023
    assert depths["e-snli", "key", 2, 2] == 0.489
    entropies = papers.published_entropies().set_index(["dataset", "quantity", "entropy_weight"])["published"]
    assert len(entropies) == 3 * 3 * 5
    assert entropies["e-snli", "entropy", 0.001] == 0.64
    accuracies = papers.published_accuracies("self-attention-1-layer").set_index("dataset")["published"]
    assert accuracies.to_dict() == pytest.approx({"yelphat": 0.913, "hatexplain": 0.611, "e-snli": 0.631})
