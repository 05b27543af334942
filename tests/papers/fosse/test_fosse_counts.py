"""More classes and less width: the sphere that layer norm leaves, planted directions, and what is
trained on them.
"""

import numpy as np
import pandas as pd
import pytest
import torch
from planted import run_cells

from analysis_book.papers.claims import NO_INTERVAL
from analysis_book.papers.fosse.splits import largest_classes
from analysis_book.training import self_attention
from analysis_lib import AnalysisError
from analysis_lib.corpora import Corpus
from analysis_lib.models.architectures import (
    SelfAttentionConfig,
    SelfAttentionForSequenceClassification,
)


def test_nothing_is_learned_below_a_norm_of_width_two():
    model = SelfAttentionForSequenceClassification(
        SelfAttentionConfig(
            vocab_size=30, hidden_size=2, num_labels=2, initializer_range=0.5, embedding_std=1.0
        )
    ).double()
    ids = torch.randint(1, 30, (16, 5), generator=torch.Generator().manual_seed(0))
    model(ids, labels=torch.arange(16) % 2).loss.backward()
    assert model.classifier.weight.grad.abs().max() > 1e-3
    assert model.encoder.word_embeddings.weight.grad.abs().max() < 1e-6


def planted(sizes: dict[str, int], name: str = "planted") -> Corpus:
    classes = sorted(sizes)
    labels = [classes.index(c) for c, count in sizes.items() for _ in range(count)]
    items = [f"{classes[label]} text {i}" for i, label in enumerate(labels)]
    return Corpus(name, items, labels=labels, classes=classes)


def test_the_largest_classes_are_the_same_in_all_splits():
    train, test = (
        planted({"d": 9, "a": 2, "c": 7, "b": 8}),
        planted({"a": 9, "b": 3, "c": 4, "d": 2}, "test"),
    )
    found = largest_classes([train, test], 3, 14)
    assert [corpus.classes for corpus in found] == [["b", "c", "d"]] * 2
    assert [np.bincount(corpus.labels).tolist() for corpus in found] == [[5, 5, 5], [2, 2, 2]]
    for corpus in found:
        texts = zip(corpus.items, corpus.labels, strict=True)
        assert all(text.startswith(corpus.classes[label]) for text, label in texts)
    assert np.bincount(largest_classes([train, test], 3)[0].labels).tolist() == [7, 7, 7]


@pytest.mark.parametrize(
    ("corpora", "count", "message"),
    [
        ([planted({"a": 2, "b": 2})], 3, "give 2 to 2"),
        ([planted({"a": 2, "b": 2})], 1, "give a whole number, 2 or more"),
        ([Corpus("bare", ["a text"])], 2, "classes of bare"),
        ([planted({"a": 2, "b": 2}), planted({"a": 2, "c": 2}, "test")], 2, "test lacks some"),
    ],
)
def test_classes_that_are_not_there_are_refused(corpora, count, message):
    with pytest.raises(AnalysisError, match=message):
        largest_classes(corpora, count)


def test_mean_directions_of_a_simplex_are_as_far_apart_as_can_be():
    mean_cosines = run_cells("classification/classes", "def mean_cosines")["mean_cosines"]
    random, labels = np.random.default_rng(0), np.arange(400) % 4
    corners = np.eye(4) - 0.25
    assert mean_cosines(corners[labels], labels) == pytest.approx([-1 / 3] * 6)
    noisy = mean_cosines(corners[labels] + 0.1 * random.standard_normal((400, 4)), labels)
    assert noisy == pytest.approx([-1 / 3] * 6, abs=0.05)
    assert mean_cosines(random.standard_normal((90, 3)), np.arange(90) % 9).mean() >= -1 / 8


def test_the_least_width_is_the_first_that_gives_the_share():
    accuracies = {
        (2, 0): [0.5, 0.95, 0.9, 1.0],
        (2, 1): [0.5, 0.88, 0.96, 1.0],
        (9, 0): [0.1, 0.4, 0.7, 0.8],
    }
    rows = [
        {"classes": count, "seed": seed, "width": width, "accuracy": accuracy}
        for (count, seed), found in accuracies.items()
        for width, accuracy in zip((2, 3, 8, 64), found, strict=True)
    ]
    found = run_cells("classification/classes", "by_width = ", accuracies=pd.DataFrame(rows))
    assert found["least"].to_dict() == {2: 3, 9: 64}
    assert found["single"].agg(["min", "max"]).loc[2].tolist() == [3, 8]
    assert found["means_of"].iloc[:, -1].tolist() == pytest.approx([1.0, 0.8])


SETTINGS = {"batch": 8, "vocabulary": 120, "learning_rate": 0.02}
EPOCHS = {"epochs": 8, "patience": 8}


@pytest.fixture
def words(monkeypatch, tmp_path):
    """Four classes, each with words of its own; and what is trained on them is kept apart."""
    random, names = np.random.default_rng(0), ["ant", "bee", "cat", "dog"]
    own = {name: [f"{name}{letter}" for letter in "xyz"] for name in names}

    def load(size: int) -> Corpus:
        labels = (np.arange(size) % 4).tolist()
        items = [" ".join(random.choice([*own[names[label]], "and", "the"], 6)) for label in labels]
        return Corpus("words", items, labels=labels, classes=names)

    corpora = load(96), load(48), load(48)
    monkeypatch.setenv("ANALYSIS_LIB_DATA", str(tmp_path))
    monkeypatch.setattr("analysis_book.papers.fosse.splits.splits", lambda data: corpora)
    trained = "analysis_book.training.self_attention"
    monkeypatch.setattr(
        trained,
        lambda *texts, **rest: self_attention(*texts, **{**rest, **SETTINGS}),
        raising=False,
    )
    return corpora


def test_planted_classes_have_directions_of_their_own(words):
    names = {
        "data": "words",
        "class_counts": [2, 4],
        "width": 16,
        "seeds": 2,
        "train_limit": 0,
        "test_limit": 40,
    }
    cells = (
        "trained = {}",
        "def area_and_cosine",
        "estimates[count].append",
        "measured = pd.DataFrame(",
    )
    ran = run_cells("classification/classes", *cells, "apart = ", **names, **EPOCHS)
    found = ran["measured"]
    assert found[["classes", "seed"]].to_numpy().tolist() == [[2, 0], [2, 1], [4, 0], [4, 1]]
    assert (found["accuracy"] > 0.9).all()
    assert (found["area"] > 0.9).all()
    assert (found["cosine"] >= -1 / (found["classes"] - 1) - 1e-9).all()
    for of_seeds in ran["estimates"].values():
        for area, cosine in of_seeds:
            assert area.draws == 20
            assert cosine.ci_low < cosine.value < cosine.ci_high
    # Of two trainings there is no interval; two classes are no question of the paper.
    assert ran["verdicts"]["classes"].tolist() == [4, 4]
    assert set(ran["verdicts"]["verdict"]) == {NO_INTERVAL}
    assert (
        ran["verdicts"].set_index("id").loc["fosse-direction-per-class", "value"]
        == found["area"][2:].mean()
    )


def test_widths_are_trained_and_scored_one_by_one(words):
    names = {
        "data": "words",
        "class_counts": [4],
        "widths": [2, 16],
        "width_seeds": 1,
        "seeds": 0,
        "train_limit": 0,
        "narrow_rate": 1e-3,
        **EPOCHS,
    }
    cells = ("trained = {}", "def narrow", "accuracies = pd")
    found = run_cells("classification/classes", *cells, **names)["accuracies"].set_index("width")
    # Whatever the two points of width 2 are, they stand for two of the four classes at most.
    assert found.loc[2, "accuracy"] <= 0.5
    assert found.loc[16, "accuracy"] > 0.9


def test_the_circle_is_a_circle(words):
    narrow = {**EPOCHS, "narrow_rate": 0.02, "train_limit": 0, "shown_classes": 4}
    found = run_cells("classification/classes", "def narrow", "plane = ", corpora=words, **narrow)[
        "circle"
    ]
    assert np.hypot(found["x"], found["y"]).to_numpy() == pytest.approx(
        np.full(48, 3**0.5), abs=1e-4
    )
    assert sorted(set(found["class"])) == ["ant", "bee", "cat", "dog"]
