"""Fosse et al., section 3: claims on planted similarities and planted directions, and the published numbers."""

import numpy as np
import pandas as pd
import pytest

from analysis_lib import papers
from analysis_lib.errors import AnalysisError
from analysis_lib.papers.fosse.similarity import last_third

# The numbers of section 3, and straight lines between them.
PRETRAINED = np.append(np.linspace(0.12, 0.42, 12), 0.41)
FINE_TUNED = np.concatenate([np.linspace(0.08, 0.34, 9), np.linspace(0.34, 0.69, 5)[1:]])


class Planted(dict):
    """Tables of ``utterance_similarity`` without a model, and without each of three groups of utterances."""

    def __init__(self, curve: np.ndarray, groups: tuple[np.ndarray, ...] = (), texts: str = "one"):
        self.groups, self.run = [Planted(group) for group in groups], {"data_sha256": texts}
        layers = np.arange(len(curve))
        hidden = pd.DataFrame({"space": "hidden", "layer": layers, "similarity": curve})
        values = pd.DataFrame({"space": "value", "layer": layers[1:], "similarity": 0.9})
        table = pd.concat([hidden, values]).assign(ci_low=lambda t: t["similarity"] - 0.01)
        super().__init__(utterance_similarity=table.assign(ci_high=lambda t: t["similarity"] + 0.01))

    def left_out(self, statistic):
        value = statistic(self)
        return value, np.array([statistic(group) for group in self.groups]).reshape(-1, len(value))


def planted(curve: np.ndarray, noise: float = 1e-4) -> Planted:
    return Planted(curve, tuple(curve + shift * noise for shift in (-1, 0, 1)))


def verdicts_of(before: np.ndarray, after: np.ndarray) -> list[str]:
    return papers.fosse_similarity_verdicts(planted(before), planted(after))["verdict"].tolist()


def test_similarity_claims_hold_on_the_published_numbers():
    assert verdicts_of(PRETRAINED, FINE_TUNED) == ["holds"] * 5


def test_similarity_claims_fail_on_curves_that_fall():
    assert verdicts_of(PRETRAINED[::-1], 0.77 - FINE_TUNED) == ["does not hold"] * 5


@pytest.mark.parametrize(
    ("claim", "before", "after"),
    [
        # Of eleven steps eight grow: less than three of four.
        (0, np.concatenate([[0.3, 0.2, 0.1, 0.05], np.linspace(0.12, 0.42, 8), [0.41]]), FINE_TUNED),
        (1, np.append(PRETRAINED[:-1], 0.43), FINE_TUNED),
        (2, np.append(PRETRAINED[:-1], 0.41), np.linspace(0.08, 0.40, 13) ** 1.01),
        (3, PRETRAINED, np.concatenate([[0.2], FINE_TUNED[1:]])),
        (4, PRETRAINED, np.concatenate([np.linspace(0.08, 0.6, 9), np.linspace(0.6, 0.69, 5)[1:]])),
    ],
)
def test_each_similarity_claim_fails_on_the_curve_that_contradicts_it(claim, before, after):
    assert verdicts_of(before, after)[claim] == "does not hold"


def test_an_interval_leaves_the_same_utterances_out_of_both():
    """What both models owe to a text is no uncertainty of the difference."""
    shifts = (-0.2, 0.0, 0.2)
    before, after = (Planted(c, tuple(c + shift for shift in shifts)) for c in (PRETRAINED, FINE_TUNED))
    change = papers.fosse_similarity_by_layer(before, after)
    assert change["layer"].tolist() == list(range(13))
    assert change["difference"].to_numpy() == pytest.approx(FINE_TUNED - PRETRAINED)
    assert change["ci_low"].to_numpy() == pytest.approx(change["difference"].to_numpy())
    apart = Planted(FINE_TUNED, tuple(FINE_TUNED - shift for shift in shifts))
    wide = papers.fosse_similarity_by_layer(before, apart)
    assert (wide["ci_high"] - wide["difference"] > 0.4).all()
    assert verdicts_of_tables(before, apart)[2] == "undecided"


def verdicts_of_tables(before: Planted, after: Planted) -> list[str]:
    return papers.fosse_similarity_verdicts(before, after)["verdict"].tolist()


def test_other_layers_and_other_texts_are_refused():
    with pytest.raises(AnalysisError, match="same layers and texts"):
        papers.fosse_similarity_by_layer(planted(PRETRAINED), planted(FINE_TUNED[:7]))
    with pytest.raises(AnalysisError, match="same layers and texts"):
        papers.fosse_similarity_by_layer(planted(PRETRAINED), Planted(FINE_TUNED, (FINE_TUNED,) * 3, texts="other"))


def test_the_last_third_begins_where_the_papers_does():
    assert [last_third(depth) for depth in (12, 6, 3, 2)] == [8, 4, 2, 1]


def test_published_similarities_stand_beside_ours_of_the_same_place():
    found = papers.compare_fosse_similarity(planted(PRETRAINED), planted(FINE_TUNED))
    assert found["layer"].tolist() == [0, 12, 11, 0, 8, 12]
    assert found["model"].tolist() == ["pretrained"] * 3 + ["fine-tuned"] * 3
    assert found["ours"].to_numpy() == pytest.approx(found["published"].to_numpy())
    assert (found["ci_high"] - found["ours"]).to_numpy() == pytest.approx([0.01] * 6)


def test_published_accuracies_stand_below_ours():
    predictions = pd.DataFrame({"label": ["a"] * 6 + ["b"] * 4, "predicted": ["a"] * 9 + ["b"]})
    found = papers.compare_fosse_accuracy(predictions, "mine", "texts")
    ours = found.iloc[0]
    assert (ours["model"], ours["corpus"], ours["accuracy"], ours["most_frequent"]) == ("mine", "texts", 0.7, 0.6)
    assert ours["ci_low"] < 0.7 < ours["ci_high"]
    published = found.iloc[1:].set_index("corpus")["accuracy"]
    assert published.to_dict() == pytest.approx({"yelphat": 0.936, "hatexplain": 0.401, "e-snli": 0.887})


def cones(classes: int, noise: float, angle: float = 90.0) -> tuple[np.ndarray, np.ndarray]:
    """Vectors around a direction a class, the second at an angle to the first, the third orthogonal to both."""
    random, labels = np.random.default_rng(0), np.arange(40 * classes) % classes
    second = np.cos(np.radians(angle)), np.sin(np.radians(angle))
    directions = np.pad([[1, 0, 0], [*second, 0], [0, 0, 1]][:classes], ((0, 0), (0, 9)))
    return directions[labels] + noise * random.standard_normal((len(labels), 12)), labels


def directions_of(before: np.ndarray, after: np.ndarray, labels: np.ndarray) -> list[str]:
    correct = np.arange(len(labels)) % 4 > 0
    return papers.fosse_direction_verdicts(before, after, labels, correct)["verdict"].tolist()


def test_direction_claims_hold_on_one_cloud_that_becomes_two_orthogonal_cones():
    after, labels = cones(2, noise=0.1)
    before = np.random.default_rng(1).standard_normal(after.shape)
    assert directions_of(before, after, labels) == ["holds"] * 5


def test_direction_claims_fail_on_two_cones_that_become_one_cloud():
    before, labels = cones(2, noise=0.1)
    after = np.random.default_rng(1).standard_normal(before.shape)
    assert directions_of(before, after, labels)[:3] == ["does not hold"] * 3


@pytest.mark.parametrize("angle", [40, 150])
def test_classes_at_another_angle_are_told_apart_and_not_orthogonal(angle):
    after, labels = cones(2, noise=0.1, angle=angle)
    before = np.random.default_rng(1).standard_normal(after.shape)
    assert directions_of(before, after, labels) == ["holds"] * 3 + ["does not hold"] * 2


def test_a_median_of_zero_is_not_most_cosines_near_zero():
    """Half of one class lies with the other class, half opposite to it."""
    after, labels = cones(2, noise=0.1)
    other = labels == 1
    after[other] = after[labels == 0] * np.where(np.arange(other.sum()) % 2, 1, -1)[:, None]
    before = np.random.default_rng(1).standard_normal(after.shape)
    found = papers.fosse_direction_verdicts(before, after, labels, np.ones(len(labels), bool))
    assert found["value"].iloc[4] < 0.1
    assert found["verdict"].iloc[4] == "does not hold"


def test_of_three_classes_the_one_that_is_told_apart_least_decides():
    after, labels = cones(3, noise=0.1)
    before = np.random.default_rng(1).standard_normal(after.shape)
    assert directions_of(before, after, labels) == ["holds"] * 3
    two_alike, labels = cones(3, noise=0.1, angle=0)
    found = papers.fosse_direction_verdicts(before, two_alike, labels, np.ones(len(labels), bool))
    assert found["value"][1] < 0.8
    assert directions_of(before, two_alike, labels)[1] != "holds"
