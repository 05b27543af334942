"""Classes and directions: the separation against scikit-learn, claims on planted cones, and a small model's vectors."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from planted import run_cells
from sklearn.metrics import roc_auc_score

from analysis_lib import AnalysisError, load_model
from analysis_lib.corpora import Corpus
from analysis_lib.metrics.intervals import jackknife_interval
from analysis_lib.papers.fosse import directions
from analysis_lib.papers.fosse.directions import (
    areas,
    class_vectors,
    cosines,
    draw_representatives,
    mean_areas,
    over_utterances,
)
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
    _, low, high = over_utterances(lambda kept: mean_areas(cloud, labels, correct, kept), Corpus("x", range(200)))
    assert ((low < 0.5) & (high > 0.5)).all()


def test_what_cannot_be_separated_is_refused():
    with pytest.raises(AnalysisError, match="two classes"):
        draw_representatives(np.zeros(4, int), np.ones(4, bool))
    with pytest.raises(AnalysisError, match="class 1 was classified correctly"):
        draw_representatives(np.array([0, 0, 1, 1]), np.array([True, True, False, False]))


def test_examples_are_the_nearest_and_farthest_and_never_the_representative():
    angles = np.radians([0, 10, 70, 30, 50, 100])
    vectors, labels = np.stack([np.cos(angles), np.sin(angles)], 1), np.array([0, 0, 0, 1, 1, 1])
    found = run_cells(
        "classification/direction",
        "nearest other",
        after=cosines(vectors),
        labels=labels,
        classes=np.array(["a", "b"]),
        representatives={0: 0, 1: 5},
        predictions=pd.DataFrame({"predicted": list("abaabb")}),
        test=Corpus("texts", [str(i) for i in range(6)]),
    )["examples"]
    assert found["representative"].tolist() == ["a"] * 5 + ["b"] * 5
    assert found["which"].tolist() == ["itself", "nearest", "farthest", "nearest other", "median other"] * 2
    assert found["text"].tolist() == list("0123454321")
    assert found["class"].tolist() == list("aaabbbbbaa")
    assert found["predicted"].tolist() == list("abaabbbaab")
    assert found["cosine"].tolist()[1:5] == pytest.approx(np.cos(np.radians([10, 70, 30, 50])).tolist())


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


def test_images_are_refused(tmp_path):
    tiny.save(tmp_path / "vit", "vit")
    with pytest.raises(AnalysisError, match="reads texts"):
        class_vectors(load_model(str(tmp_path / "vit")), Corpus("texts", tiny.TEXTS))


def cloud_and_cones(utterances: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Vectors in which two classes are one cloud, vectors in which each has a direction, and the classes."""
    random = np.random.default_rng(2)
    labels = np.arange(utterances) % 2
    cloud = random.standard_normal((utterances, 12))
    return cloud, 2 * np.eye(2, 12)[labels] + random.standard_normal((utterances, 12)) / 3, labels


def test_intervals_leave_blocks_of_neighbours_out_of_all_that_is_computed():
    _, cones, labels = cloud_and_cones(50)
    correct, similar = np.ones(50, bool), cosines(cones)
    value, low, high = over_utterances(lambda kept: mean_areas(similar, labels, correct, kept), Corpus("x", range(50)))
    left_out = []
    for group in range(20):
        kept = np.arange(50) * 20 // 50 != group
        left_out.append(mean_areas(cosines(cones[kept]), labels[kept], correct[kept], np.arange(kept.sum())))
    expected = jackknife_interval(mean_areas(similar, labels, correct, np.arange(50)), np.array(left_out))
    assert np.allclose((low, high), expected, atol=1e-12)
    assert ((low < value) & (value < high)).all()


def test_cosines_of_others_are_all_of_a_representative_and_another_class():
    _, cones, labels = cloud_and_cones(30)
    correct, kept, similar = np.arange(30) % 3 > 0, np.arange(5, 28), cosines(cones)
    names = {"after": similar, "labels": labels, "correct": correct}
    found = run_cells("classification/direction", "def of_others", **names)["of_others"](kept, similar, correct)
    for label in range(2):
        chosen = [r for r in kept if correct[r] and labels[r] == label]
        rest = [similar[r, j] for r in chosen for j in kept if labels[j] != label]
        assert sorted(found[label]) == sorted(rest)


def test_representatives_are_correct_utterances_of_their_class():
    labels, correct = np.arange(60) % 3, np.arange(60) % 4 == 0
    drawn = {seed: draw_representatives(labels, correct, seed) for seed in range(8)}
    for representatives in drawn.values():
        assert list(representatives) == [0, 1, 2]
        assert all(correct[place] and labels[place] == label for label, place in representatives.items())
    assert draw_representatives(labels, correct, 3) == drawn[3]
    assert len({tuple(found.values()) for found in drawn.values()}) > 1
    with pytest.raises(AnalysisError, match="class 2 was classified correctly"):
        draw_representatives(labels, correct & (labels < 2))


def test_cosines_to_a_representative_leave_itself_out():
    cloud, cones, labels = cloud_and_cones(12)
    similar, places = {"before": cosines(cloud), "after": cosines(cones)}, {0: 4, 1: 7}
    names = {"labels": labels, "classes": np.array(["a", "b"]), "correct": np.ones(12, bool), "seed": 0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(directions, "draw_representatives", lambda *_: places)
        found = run_cells("classification/direction", "named = [", similar=similar, **names)["named"]
    assert len(found) == 2 * 2 * 11
    row = found[(found["stage"] == "after") & (found["representative"] == "b")].iloc[2]
    expected = cones[7] @ cones[2] / np.linalg.norm(cones[7]) / np.linalg.norm(cones[2])
    assert (row["class"], row["cosine"]) == ("a", pytest.approx(expected))


def judged(before: np.ndarray, *trained: np.ndarray, labels: np.ndarray, correct: np.ndarray | None = None):
    """The verdicts on five trainings, which take turns to end in these vectors."""
    correct = np.arange(len(labels)) % 4 > 0 if correct is None else correct
    five = {str(i): trained[i % len(trained)] for i in range(5)}
    names = {"before": cosines(before), "classes": np.unique(labels), "labels": labels, "display": lambda _: None}
    names |= {"more": {}}
    names |= {"folders": [*five], "load_model": str, "test": Corpus("x", [str(label) for label in labels])}
    predicted = pd.DataFrame({"label": True, "predicted": correct})
    names |= {"predict": lambda *_: predicted}
    stand_in = {**vars(directions), "class_vectors": lambda folder, _: five[folder]}
    return run_cells(
        "classification/direction",
        "def of_others",
        "def orthogonality",
        "of_seeds, trained",
        "estimates = ",
        **names,
        directions=SimpleNamespace(**stand_in),
    )["verdicts"]


def planted_cones(classes: int, noise: float, angle: float = 90.0) -> tuple[np.ndarray, np.ndarray]:
    """Vectors around a direction per class, the second at an angle to the first, the third orthogonal to both."""
    random, labels = np.random.default_rng(0), np.arange(40 * classes) % classes
    second = np.cos(np.radians(angle)), np.sin(np.radians(angle))
    axes = np.pad([[1, 0, 0], [*second, 0], [0, 0, 1]][:classes], ((0, 0), (0, 9)))
    return axes[labels] + noise * random.standard_normal((len(labels), 12)), labels


def one_cloud(after: np.ndarray) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(after.shape)


def test_direction_claims_hold_on_one_cloud_that_becomes_two_orthogonal_cones():
    after, labels = planted_cones(2, noise=0.1)
    assert judged(one_cloud(after), after, labels=labels)["verdict"].tolist() == ["holds"] * 5


def test_direction_claims_fail_on_two_cones_that_become_one_cloud():
    before, labels = planted_cones(2, noise=0.1)
    assert judged(before, one_cloud(before), labels=labels)["verdict"].tolist()[:3] == ["does not hold"] * 3


@pytest.mark.parametrize("angle", [40, 150])
def test_classes_at_another_angle_are_told_apart_and_not_orthogonal(angle):
    after, labels = planted_cones(2, noise=0.1, angle=angle)
    verdicts = judged(one_cloud(after), after, labels=labels)["verdict"].tolist()
    assert verdicts == ["holds"] * 3 + ["does not hold"] * 2


def test_a_median_of_zero_is_not_most_cosines_near_zero():
    """Half of one class lies with the other class, half opposite to it."""
    after, labels = planted_cones(2, noise=0.1)
    other = labels == 1
    after[other] = after[labels == 0] * np.where(np.arange(other.sum()) % 2, 1, -1)[:, None]
    found = judged(one_cloud(after), after, labels=labels, correct=np.ones(len(labels), bool))
    assert found["value"].iloc[4] < 0.1
    assert found["verdict"].iloc[4] == "does not hold"


def test_of_three_classes_the_one_that_is_told_apart_least_decides():
    after, labels = planted_cones(3, noise=0.1)
    assert judged(one_cloud(after), after, labels=labels)["verdict"].tolist()[:3] == ["holds"] * 3
    two_alike, labels = planted_cones(3, noise=0.1, angle=0)
    assert judged(one_cloud(after), two_alike, labels=labels, correct=np.ones(len(labels), bool))["value"][1] < 0.8
    assert judged(one_cloud(after), two_alike, labels=labels)["verdict"][1] != "holds"


def test_trainings_that_end_differently_leave_the_claims_undecided():
    """Each training alone would decide; one in five that fails takes the verdict away."""
    after, labels = planted_cones(2, noise=0.1)
    failed = one_cloud(after)
    found = judged(failed, *[after] * 4, failed, labels=labels).set_index("id")["verdict"]
    assert found["fosse-direction-is-class"] == "undecided"
    assert found["fosse-orthogonal-most"] == "holds"


TEXTS = ["good fine film", "good old thing", "a fine day", "bad film", "a bad bad day", "dull"]


def polarity(training: list[str], labels: list[int]) -> dict:
    whole, test = Corpus("train", training, labels=labels, classes=["a", "b"]), Corpus("test", TEXTS)
    return run_cells(
        "classification/direction", "polar = ", splits=lambda _: (whole, None, None), data="planted", test=test
    )


def test_polarity_words_are_often_those_of_one_class():
    training = [*["good fine film"] * 10, *["bad film"] * 12, *["fine film"] * 4, *["dull"] * 9]
    found = polarity(training, [0] * 10 + [1] * 12 + [1] * 4 + [1] * 9)
    # Of fourteen texts with "fine" ten are of one class; "film" is in both, and "dull" in nine texts.
    assert set(found["polar"]) == {"good", "bad"}
    expected = np.full((6, 6), np.nan)
    expected[:2], expected[3:5] = [1, 1, 0, 0, 0, 0], [0, 0, 0, 1, 1, 0]
    np.testing.assert_array_equal(found["overlap"], expected)


@pytest.mark.parametrize(("lexical", "expected"), [(True, 1 - 9 / 39), (False, 0.0)])
def test_words_of_the_nearest_are_set_against_those_of_the_class(lexical, expected):
    """Forty utterances of a class, ten for each of four words: those of one word lie together, or anywhere."""
    random, words, labels = np.random.default_rng(3), np.arange(80) % 4, np.arange(80) // 40
    place = words if lexical else random.permutation(words)
    vectors = np.eye(8)[place + 4 * labels] + 0.1 * random.standard_normal((80, 8))
    overlap = (words[:, None] == words).astype(float)
    overlap[7] = np.nan
    names = {"labels": labels, "overlap": overlap, "nearest": 5, "trained": []}
    shared = run_cells("classification/direction", "def excess", **names)["words_shared"]
    (found,) = shared(np.arange(80), cosines(vectors), np.ones(80, bool))
    assert found == pytest.approx(expected, abs=1e-9 if lexical else 0.06)


def test_a_representative_of_one_class_and_the_two_others():
    """The third class leans towards the second: a representative of the second tells it from the first."""
    vectors, labels = planted_cones(3, noise=0.05)
    vectors[labels == 2] += 0.1 * vectors[labels == 1]
    correct, similar = np.arange(120) % 5 > 0, cosines(vectors)
    test = Corpus("x", [str(i) for i in range(120)])
    names = {"labels": labels, "classes": np.array(["a", "contradiction", "c"]), "test": test, "more": {}}
    names |= {"trained": [(similar, correct)] * 5, "display": lambda _: None}
    found = run_cells(
        "classification/direction", "def others_apart", "apart = [", '"contradiction" in classes', **names
    )
    rest, representatives = labels != 1, np.flatnonzero(correct & (labels == 1))
    area = np.mean([roc_auc_score(labels[rest] == 0, similar[i, rest]) for i in representatives])
    assert found["more"]["contradiction-apart"][:, 0] == pytest.approx(0.6 - max(area, 1 - area))
    assert found["areas"][1] == pytest.approx(1 - area)
    assert found["areas"][0] < 0.6 < 0.7 < min(found["areas"][1:])
    two = run_cells(
        "classification/direction", "def others_apart", "apart = [", **{**names, "classes": np.array(["a", "b"])}
    )
    assert "apart" not in two


def test_numbers_of_heads_are_those_of_their_attention():
    random = np.random.default_rng(0)
    query, key, value = random.standard_normal((3, 2, 5, 4))
    query[1] = query[1, 0]
    of_heads = run_cells("classification/direction", "def of_heads")["of_heads"]
    similar, same, entropy, output, values = of_heads(query, key, value)
    assert (similar[1], same[1], output[1]) == (pytest.approx(1), pytest.approx(1), pytest.approx(1))
    scores = np.exp(query[0] @ key[0].T / 2)
    rows = scores / scores.sum(1, keepdims=True)
    assert entropy[0] == pytest.approx(-(rows * np.log(rows)).sum(1).mean() / np.log(5))
    assert same[0] == pytest.approx(1 - np.abs(rows - rows.mean(0)).sum(1).mean() / 2)
    off = ~np.eye(5, dtype=bool)
    assert similar[0] == pytest.approx(cosines(query[0])[off].mean())
    assert output[0] == pytest.approx(cosines(rows @ value[0])[off].mean())
    assert values[0] == pytest.approx(cosines(value[0])[off].mean())
    # Attention that is uniform has the largest entropy, and one row.
    assert of_heads(0 * query + 1e-9, key, value)[1:3] == pytest.approx(np.ones((2, 2)))


@pytest.mark.parametrize(("by_queries", "expected"), [(1.0, 0.9), (0.0, 0.0), (-1.0, -0.9)])
def test_rows_that_are_uniform_do_not_make_queries_align(by_queries, expected):
    """Entropy goes with queries and makes rows the same by itself."""
    random = np.random.default_rng(1)
    entropy, own, noise = random.standard_normal((3, 12, 400))
    query, same = entropy + own, 3 * entropy + by_queries * own + 0.3 * noise
    output, value = np.full((2, 12, 400), 0.5) + np.array([0.2, 0.0])[:, None, None]
    of_texts = np.stack([query, same, entropy, output, value], axis=1)
    texts = np.repeat(of_texts[:1], 12, axis=0)
    names = {"measured": [texts], "read": Corpus("x", [str(i) for i in range(12)]), "words": []}
    found = run_cells("classification/direction", "def over_heads", **names)["more"]
    assert found["queries-align"][0, 0] == pytest.approx(expected, abs=0.12)
    assert found["outputs-in-cone"][0].tolist() == pytest.approx([0.2] * 3)


def test_every_layer_of_a_classifier_is_measured_on_every_text(tmp_path):
    tiny.save(tmp_path / "bert", "bert")
    read = Corpus("texts", tiny.TEXTS, labels=[0] * len(tiny.TEXTS), classes=["a"])
    names = {"folders": [tmp_path / "bert"], "test": read, "cone_texts": len(tiny.TEXTS)}
    found = run_cells("classification/direction", "def of_heads", "read = stratified", **names)
    (measured,) = found["measured"]
    values, outputs = directions.attention_vectors(load_model(str(tmp_path / "bert")), found["read"].items[0], 3)
    assert measured.shape == (len(tiny.TEXTS), 5, 3 * len(values))
    alike = found["alike"]
    assert measured[0, 3, -len(values) :] == pytest.approx(alike(outputs), abs=1e-5)
    assert measured[0, 4, -len(values) :] == pytest.approx(alike(values), abs=1e-5)
