"""Words: the examples of Table 2, polarity words, and what the nearest texts share of them, on
planted texts.
"""

import numpy as np
import pandas as pd
import pytest
from planted import run_cells

from analysis_book.papers.fosse.directions import cosines
from analysis_lib.corpora import Corpus

PAGE = "classification/words"


def test_examples_are_the_nearest_and_farthest_and_never_the_representative(monkeypatch):
    angles = np.radians([0, 10, 70, 30, 50, 100])
    vectors, labels = np.stack([np.cos(angles), np.sin(angles)], 1), np.array([0, 0, 0, 1, 1, 1])
    names = {
        "labels": labels,
        "classes": np.array(["a", "b"]),
        "folders": [""],
        "display": lambda _: None,
    }
    names |= {
        "trained": [(cosines(vectors), np.arange(6) == 0)],
        "test": Corpus("texts", [*"012345"]),
    }
    monkeypatch.setattr(
        "analysis_book.papers.fosse.directions.predicted", lambda *_: np.array([*"abaabb"])
    )
    names["trained"][0][1][5] = True
    found = run_cells(PAGE, "draw_representatives", "tbl-examples", **names)["examples"]
    assert found["which"].tolist() == [
        "itself",
        "nearest",
        "farthest",
        "nearest other",
        "median other",
    ]
    assert found["text"].tolist() == [*"01234"]
    assert found["class"].tolist() == [*"aaabb"]
    assert found["predicted"].tolist() == [*"abaab"]
    assert found["cosine"].tolist() == pytest.approx(
        np.cos(np.radians([0, 10, 70, 30, 50])).tolist(), abs=1e-6
    )
    hidden = run_cells(PAGE, "draw_representatives", "tbl-examples", **names, show_texts=False)[
        "examples"
    ]
    assert "text" not in hidden


TEXTS = ["good fine film", "good old thing", "a fine day", "bad film", "a bad bad day", "dull"]


def polarity(training: list[str], labels: list[int]) -> dict:
    whole, test = (
        Corpus("train", training, labels=labels, classes=["a", "b"]),
        Corpus("test", TEXTS),
    )
    return run_cells(
        PAGE,
        "def words_of",
        "polar = ",
        splits=lambda _: (whole, None, None),
        data="planted",
        test=test,
    )


def test_polarity_words_are_often_those_of_one_class():
    training = [*["good fine film"] * 10, *["bad film"] * 12, *["fine film"] * 4, *["dull"] * 9]
    found = polarity(training, [0] * 10 + [1] * 12 + [1] * 4 + [1] * 9)
    # Of fourteen texts with "fine" ten are of one class; "film" is in both, and "dull" in nine
    # texts.
    assert set(found["polar"]) == {"good", "bad"}
    expected = np.full((6, 6), np.nan)
    expected[:2], expected[3:5] = [1, 1, 0, 0, 0, 0], [0, 0, 0, 1, 1, 0]
    np.testing.assert_array_equal(found["overlap"], expected)


@pytest.mark.parametrize(("lexical", "expected"), [(True, 1 - 9 / 39), (False, 0.0)])
def test_words_of_the_nearest_are_set_against_those_of_the_class(lexical, expected):
    """Forty texts of a class, ten for each of four words: those of one word lie together, or
    anywhere.
    """
    random, words, labels = np.random.default_rng(3), np.arange(80) % 4, np.arange(80) // 40
    place = words if lexical else random.permutation(words)
    vectors = np.eye(8)[place + 4 * labels] + 0.1 * random.standard_normal((80, 8))
    overlap = (words[:, None] == words).astype(float)
    overlap[7] = np.nan
    test = Corpus("x", [str(i) for i in range(80)], labels=labels.tolist(), classes=["a", "b"])
    names = {
        "labels": labels,
        "classes": np.array(["a", "b"]),
        "overlap": overlap,
        "nearest": 5,
        "beside": [],
    }
    names |= {
        "trained": [(cosines(vectors), np.ones(80, bool))] * 5,
        "train": test,
        "test": test,
        "whole": test,
    }
    names |= {
        "trainings": pd.DataFrame({"epochs": [2] * 5, "failed": False, "judged": True}),
        "display": print,
    }
    cells = "def in_order", "tenths = ", "def excess", "recorded = "
    found = run_cells(PAGE, *cells, **names)
    (row,) = found["verdicts"].itertuples()
    assert row.value == pytest.approx(expected, abs=1e-9 if lexical else 0.06)
    assert (row.verdict == "does not hold") == lexical
    of_tenth = found["shared"].groupby("tenth")["share"].mean()
    assert len(found["shared"]) == 5 * 2 * 10
    assert (of_tenth[1], of_tenth[10]) == (
        pytest.approx((1, 0) if lexical else (9 / 39, 9 / 39), abs=0.1)
    )


def test_a_word_leans_to_the_class_whose_direction_it_has():
    counts = pd.DataFrame({0: [30.0, 5.0, 2.0], 1: [10.0, 15.0, 3.0]}, index=["one", "two", "rare"])
    vectors = {
        "words": np.array([[2.0, 0.0], [1.0, 1.0]]),
        "texts": np.array([[1.0, 0.0], [0.0, 3.0]]),
    }
    names = {
        "counts": counts,
        "labels": np.array([0, 1]),
        "classes": np.array(["a", "b"]),
        "folders": [""],
    }
    names |= {"test": Corpus("texts", ["x", "y"]), "load_model": str, "least": 20}

    class Directions:
        class_vectors = staticmethod(lambda _, corpus: vectors[corpus.name].copy())

    found = run_cells(PAGE, "words = counts", "leaning = pd", **names, directions=Directions)[
        "leaning"
    ]
    assert found["word"].tolist() == ["one", "two"]
    assert found["class"].tolist() == ["b", "b"]
    assert found["share"].tolist() == [0.25, 0.75]
    assert found["lead"].tolist() == pytest.approx([-1, 0])
