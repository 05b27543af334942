"""Classes and directions: the separation against scikit-learn, and claims on planted cones."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from planted import run_cells
from sklearn.metrics import roc_auc_score

from analysis_book.papers.fosse import directions
from analysis_book.papers.fosse.directions import (
    areas,
    class_vectors,
    cosines,
    draw_representatives,
    mean_areas,
    of_class,
    others_apart,
    over_texts,
    to_representatives,
)
from analysis_lib import AnalysisError, load_model
from analysis_lib.corpora import Corpus
from analysis_lib.metrics.intervals import jackknife_interval
from tests import tiny


def test_the_area_is_scikit_learns():
    random = np.random.default_rng(0)
    vectors, labels = random.standard_normal((60, 5)), random.integers(0, 3, 60)
    vectors[:, 0] += labels
    correct = random.random(60) < 0.7
    similar = cosines(vectors)
    for label in range(3):
        expected = []
        for i in np.flatnonzero(correct & (labels == label)):
            rest = np.arange(60) != i
            expected.append(roc_auc_score(labels[rest] == label, similar[i, rest]))
        assert areas(similar, labels == label, correct) == pytest.approx(expected, abs=1e-12)


def test_ties_count_half():
    assert areas(np.ones((8, 8)), np.arange(8) % 2 == 0, np.ones(8, bool)).tolist() == [0.5] * 4


def test_planted_cones_separate_and_one_cloud_does_not():
    random = np.random.default_rng(1)
    labels, centres, correct = np.arange(200) % 2, np.eye(2, 30), np.ones(200, bool)
    cones = cosines(3 * centres[labels] + random.standard_normal((200, 30)) / 5)
    assert mean_areas(cones, labels, correct, np.arange(200)).tolist() == [1, 1]
    cloud = cosines(random.standard_normal((200, 30)))
    numbers = {"area": lambda kept: mean_areas(cloud, labels, correct, kept)}
    assert [one.side(0.5) for one in over_texts(numbers, Corpus("x", range(200)))["area"]] == [
        "undecided"
    ] * 2


def test_what_cannot_be_separated_is_refused():
    with pytest.raises(AnalysisError, match="two classes"):
        draw_representatives(np.zeros(4, int), np.ones(4, bool))
    with pytest.raises(AnalysisError, match="class 1 was classified correctly"):
        draw_representatives(np.array([0, 0, 1, 1]), np.array([True, True, False, False]))


def test_the_vectors_are_those_of_the_first_token_in_the_order_of_the_corpus(tmp_path):
    tiny.save(tmp_path / "bert", "bert")
    model = load_model(str(tmp_path / "bert"), dtype="float64")
    corpus = Corpus("texts", tiny.TEXTS)
    expected = []
    for text in tiny.TEXTS:
        ids = torch.tensor([model.tokenizer(text)["input_ids"]])
        with torch.inference_mode():
            expected.append(model.model(ids).last_hidden_state[0, 0].numpy())
    assert np.allclose(class_vectors(model, corpus), np.stack(expected), atol=1e-12)


def test_vectors_that_one_page_has_asked_for_are_read_by_the_next(tmp_path, monkeypatch):
    monkeypatch.setenv("ANALYSIS_LIB_MEASUREMENTS", str(tmp_path / "kept"))
    tiny.save(tmp_path / "bert", "bert")
    model, corpus = load_model(str(tmp_path / "bert")), Corpus("texts", tiny.TEXTS)
    vectors = class_vectors(model, corpus)
    with monkeypatch.context() as patch:
        patch.delattr(directions.capture, "run")
        assert np.array_equal(class_vectors(model, corpus), vectors)
        with pytest.raises(AttributeError):
            class_vectors(model, corpus.take(range(1)))
    (kept,) = tmp_path.glob("kept/*/class_vectors-*.npy")
    kept.write_bytes(kept.read_bytes()[:-1])
    assert np.array_equal(class_vectors(model, corpus), vectors)


def test_images_are_refused(tmp_path):
    tiny.save(tmp_path / "vit", "vit")
    with pytest.raises(AnalysisError, match="reads texts"):
        class_vectors(load_model(str(tmp_path / "vit")), Corpus("texts", tiny.TEXTS))


def cloud_and_cones(utterances: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Vectors in which two classes are one cloud, vectors in which each has a direction, and the
    classes.
    """
    random = np.random.default_rng(2)
    labels = np.arange(utterances) % 2
    cloud = random.standard_normal((utterances, 12))
    return cloud, 2 * np.eye(2, 12)[labels] + random.standard_normal((utterances, 12)) / 3, labels


def test_intervals_leave_blocks_of_neighbours_out_of_all_that_is_computed():
    _, cones, labels = cloud_and_cones(50)
    correct, similar = np.ones(50, bool), cosines(cones)
    numbers = {"areas": lambda kept: mean_areas(similar, labels, correct, kept), "size": len}
    found = over_texts(numbers, Corpus("x", range(50)))
    left_out = []
    for group in range(20):
        kept = np.arange(50) * 20 // 50 != group
        left_out.append(
            mean_areas(cosines(cones[kept]), labels[kept], correct[kept], np.arange(kept.sum()))
        )
    low, high = jackknife_interval(
        mean_areas(similar, labels, correct, np.arange(50)), np.array(left_out)
    )
    assert [(one.ci_low, one.ci_high, one.draws) for one in found["areas"]] == [
        (pytest.approx(low[i]), pytest.approx(high[i]), 20) for i in range(2)
    ]
    assert found["size"].value == 50


@pytest.mark.parametrize("own", [True, False])
def test_cosines_of_a_class_are_all_of_a_representative_and_another_text(own):
    _, cones, labels = cloud_and_cones(30)
    correct, kept, similar = np.arange(30) % 3 > 0, np.arange(5, 28), cosines(cones)
    found = of_class(similar, labels, correct, own, kept)
    for label in range(2):
        chosen = [r for r in kept if correct[r] and labels[r] == label]
        rest = [
            similar[r, j] for r in chosen for j in kept if (labels[j] == label) == own and j != r
        ]
        assert sorted(found[label]) == sorted(rest)


def test_representatives_are_correct_utterances_of_their_class():
    labels, correct = np.arange(60) % 3, np.arange(60) % 4 == 0
    drawn = {seed: draw_representatives(labels, correct, seed) for seed in range(8)}
    for representatives in drawn.values():
        assert list(representatives) == [0, 1, 2]
        assert all(
            correct[place] and labels[place] == label for label, place in representatives.items()
        )
    assert draw_representatives(labels, correct, 3) == drawn[3]
    assert len({tuple(found.values()) for found in drawn.values()}) > 1
    with pytest.raises(AnalysisError, match="class 2 was classified correctly"):
        draw_representatives(labels, correct & (labels < 2))


def test_cosines_to_a_representative_leave_itself_out():
    _, cones, labels = cloud_and_cones(12)
    test = Corpus("texts", [str(i) for i in range(12)], labels=labels.tolist(), classes=["a", "b"])
    found = to_representatives(cosines(cones), test, {0: 4, 1: 7})
    assert found["representative"].tolist() == ["a"] * 11 + ["b"] * 11
    row = found[found["representative"] == "b"].iloc[2]
    expected = cones[7] @ cones[2] / np.linalg.norm(cones[7]) / np.linalg.norm(cones[2])
    assert (row["class"], row["cosine"]) == ("a", pytest.approx(expected))


def turned(vectors: np.ndarray, classes: int) -> np.ndarray:
    """The same, but a text of each class lies with another one: a number of which no text decides
    has no interval.
    """
    return np.concatenate([np.roll(vectors[:classes], 1, axis=0), vectors[classes:]])


def judged(
    before: np.ndarray,
    *trained: np.ndarray,
    labels: np.ndarray,
    correct: np.ndarray | None = None,
    classes: tuple[str, ...] = ("a", "b", "c"),
) -> pd.DataFrame:
    """The verdicts on five trainings, which take turns to end in these vectors, and on heads that
    narrow by 0.3. Two classes are called YelpHat, and three e-SNLI.
    """
    correct = np.arange(len(labels)) % 4 > 0 if correct is None else correct
    names = np.array(classes[: len(np.unique(labels))])
    test = Corpus(
        "x", [str(i) for i in range(len(labels))], labels=labels.tolist(), classes=[*names]
    )
    five = [(cosines(turned(trained[i % len(trained)], len(names))), correct) for i in range(5)]
    given = {
        "before": cosines(turned(before, len(names))),
        "labels": labels,
        "trained": five,
        "test": test,
    }
    given |= {
        "train": test,
        "folders": [*"01234"],
        "splits": lambda _: [test],
        "load_model": str,
        "cone_texts": 40,
        "data": "yelphat" if len(names) == 2 else "esnli",
    }
    given |= {
        "trainings": pd.DataFrame({"epochs": [2] * 5, "failed": False, "judged": True}),
        "beside": [],
    }
    cells = "statistics = [", "ours = pd.concat"
    stand_in = SimpleNamespace(
        **{**vars(directions), "narrowing": lambda _, texts: 0.3 + np.arange(len(texts)) / 1000}
    )
    found = run_cells("classification/direction", *cells, **given, directions=stand_in)["verdicts"]
    return found.set_index(found["id"].str.removeprefix("fosse-"))


def planted_cones(classes: int, noise: float, angle: float = 90.0) -> tuple[np.ndarray, np.ndarray]:
    """Vectors around a direction per class, the second at an angle to the first, the third
    orthogonal to both.
    """
    random, labels = np.random.default_rng(0), np.arange(40 * classes) % classes
    second = np.cos(np.radians(angle)), np.sin(np.radians(angle))
    axes = np.pad([[1, 0, 0], [*second, 0], [0, 0, 1]][:classes], ((0, 0), (0, 9)))
    return axes[labels] + noise * random.standard_normal((len(labels), 12)), labels


def one_cloud(after: np.ndarray) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(after.shape)


CLAIMS = ["classes-alike-before", "direction-is-class", "direction-by-fine-tuning"]
TWO_CLASSES = ["own-class-high", "orthogonal-median", "orthogonal-most"]


def test_direction_claims_hold_on_one_cloud_that_becomes_two_orthogonal_cones():
    after, labels = planted_cones(2, noise=0.1)
    found = judged(one_cloud(after), after, labels=labels)
    assert found["verdict"].to_dict() == dict.fromkeys(
        [*CLAIMS, *TWO_CLASSES, "outputs-in-cone"], "holds"
    )
    assert found.loc["outputs-in-cone", "value"] == pytest.approx(0.3 + 0.001 * 19.5)
    assert (
        found["sample"].tolist()[:6] == ["80 texts; 5 trainings of 2 epochs on 80 of 80 texts"] * 6
    )
    assert found["sample"].iloc[6].startswith("40 texts; ")
    assert set(found["draws"]) == {5}


def test_direction_claims_fail_on_two_cones_that_become_one_cloud():
    before, labels = planted_cones(2, noise=0.1)
    found = judged(before, one_cloud(before), labels=labels)
    assert found["verdict"][CLAIMS].tolist() == ["does not hold"] * 3
    assert found.loc["own-class-high", "value"] < 0.1


@pytest.mark.parametrize("angle", [40, 150])
def test_classes_at_another_angle_are_told_apart_and_not_orthogonal(angle):
    after, labels = planted_cones(2, noise=0.1, angle=angle)
    found = judged(one_cloud(after), after, labels=labels)
    assert found["verdict"][[*CLAIMS, *TWO_CLASSES]].tolist()[:5] == ["holds"] * 4 + [
        "does not hold"
    ]
    assert found.loc["orthogonal-most", "value"] < 0.1


def test_a_median_of_zero_is_not_most_cosines_near_zero():
    """Half of one class lies with the other class, half opposite to it."""
    after, labels = planted_cones(2, noise=0.1)
    other = labels == 1
    after[other] = after[labels == 0] * np.where(np.arange(other.sum()) % 2, 1, -1)[:, None]
    found = judged(one_cloud(after), after, labels=labels, correct=np.ones(len(labels), bool))
    assert found.loc["orthogonal-most", "value"] < 0.1
    assert found.loc["orthogonal-most", "verdict"] != "holds"


def test_of_three_classes_the_one_that_is_told_apart_least_decides():
    after, labels = planted_cones(3, noise=0.1)
    found = judged(one_cloud(after), after, labels=labels)
    assert found["verdict"].to_dict() == dict.fromkeys([*CLAIMS, "outputs-in-cone"], "holds")
    two_alike, labels = planted_cones(3, noise=0.1, angle=0)
    found = judged(one_cloud(after), two_alike, labels=labels).loc["direction-is-class"]
    assert found["value"] < 0.8
    assert found["verdict"] != "holds"


def test_trainings_that_end_differently_leave_the_claims_undecided():
    """Each training alone would decide; one in five that ends otherwise takes the verdict away."""
    after, labels = planted_cones(2, noise=0.1)
    other = one_cloud(after)
    found = judged(other, *[after] * 4, other, labels=labels)["verdict"]
    assert found["direction-is-class"] == "undecided"
    assert found["orthogonal-most"] == "holds"


def test_a_representative_of_contradiction_and_the_two_others():
    """The third class leans towards the second: a representative of the second tells it from the
    first.
    """
    vectors, labels = planted_cones(3, noise=0.05)
    vectors[labels == 2] += 0.1 * vectors[labels == 1]
    correct, similar = np.arange(120) % 5 > 0, cosines(vectors)
    rest, representatives = labels != 1, np.flatnonzero(correct & (labels == 1))
    area = np.mean([roc_auc_score(labels[rest] == 0, similar[i, rest]) for i in representatives])
    number = others_apart(similar, labels, correct, 1, np.arange(120))
    assert number == pytest.approx(0.6 - max(area, 1 - area))
    names = "a", "contradiction", "c"
    found = judged(one_cloud(vectors), vectors, labels=labels, correct=correct, classes=names)
    number = others_apart(cosines(turned(vectors, 3)), labels, correct, 1, np.arange(120))
    assert found.loc["contradiction-apart", "value"] == pytest.approx(number)
    assert found.loc["contradiction-apart", "verdict"] == "does not hold"
    # From one of the first class, both others lie equally near.
    assert others_apart(similar, labels, correct, 0, np.arange(120)) > 0
