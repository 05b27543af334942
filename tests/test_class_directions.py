"""Classes and directions: the separation against scikit-learn, on planted cones and on a small model."""

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from analysis_lib import AnalysisError, load_model
from analysis_lib.class_directions import class_vectors, cosines, examples, separation
from analysis_lib.corpora import Corpus
from tests import tiny


def test_the_area_is_scikit_learns():
    random = np.random.default_rng(0)
    vectors, labels = random.standard_normal((60, 5)), random.integers(0, 3, 60)
    vectors[:, 0] += labels
    correct = random.random(60) < 0.7
    found = separation(vectors, labels, correct).set_index("class")
    similar = cosines(vectors)
    for label in range(3):
        areas = []
        for i in np.flatnonzero(correct & (labels == label)):
            rest = np.arange(60) != i
            areas.append(roc_auc_score(labels[rest] == label, similar[i, rest]))
        row = found.loc[label]
        assert row["auc"] == pytest.approx(np.mean(areas), abs=1e-12)
        assert row["representatives"] == len(areas)
        assert (row["lowest"], row["highest"]) == pytest.approx(tuple(np.quantile(areas, [0.025, 0.975])))
        assert row["ci_low"] < row["auc"] < row["ci_high"]


def test_ties_count_half():
    found = separation(np.ones((8, 2)), np.arange(8) % 2, np.ones(8, bool))
    assert found["auc"].tolist() == [0.5, 0.5]


def test_planted_cones_separate_and_one_cloud_does_not():
    random = np.random.default_rng(1)
    labels, centres = np.arange(200) % 2, np.eye(2, 30)
    cones = 3 * centres[labels] + random.standard_normal((200, 30)) / 5
    assert (separation(cones, labels, np.ones(200, bool))["auc"] == 1).all()
    cloud = separation(random.standard_normal((200, 30)), labels, np.ones(200, bool))
    assert ((cloud["ci_low"] < 0.5) & (cloud["ci_high"] > 0.5)).all()


def test_what_cannot_be_separated_is_refused():
    vectors = np.eye(4)
    with pytest.raises(AnalysisError, match="two classes"):
        separation(vectors, np.zeros(4, int), np.ones(4, bool))
    with pytest.raises(AnalysisError, match="class 1 was classified correctly"):
        separation(vectors, np.array([0, 0, 1, 1]), np.array([True, True, False, False]))


def test_examples_are_of_the_right_class_and_not_the_representative():
    similar = np.array([0.2, 1.0, 0.7, -0.5, 0.9, 0.0, 0.1])
    own = np.array([True, True, True, True, False, False, False])
    assert examples(similar, own, 1) == {"nearest": 2, "farthest": 3, "nearest other": 4, "median other": 6}


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
