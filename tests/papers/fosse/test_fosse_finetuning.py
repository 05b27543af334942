"""Trainings: which failed, what is judged, verdicts over them, and the accuracies of the page on
Table 1.
"""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from planted import run_cells

from analysis_book.papers import claims
from analysis_book.papers.fosse import directions, finetuning
from analysis_lib.corpora import Corpus
from analysis_lib.metrics.intervals import Estimate, seed_and_unit_interval


def corpus(size: int) -> Corpus:
    return Corpus(
        "x", [str(i) for i in range(size)], labels=[i % 2 for i in range(size)], classes=["a", "b"]
    )


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """Trainings that reach the accuracies of a table, by their seed, without any training."""
    reached: dict[int, list[float]] = {}

    def finetune(_, train, validation, *, seed: int, **settings) -> Path:
        folder = tmp_path / str(seed)
        folder.mkdir(exist_ok=True)
        accuracies = reached.get(seed, [0.5, 0.9, 0.8])
        table = {"epoch": range(1, len(accuracies) + 1), "loss": 1.0, "accuracy": accuracies}
        pd.DataFrame(table).to_csv(folder / "epochs.csv", index=False)
        return folder

    monkeypatch.setattr(finetuning, "finetune", finetune)
    return reached


def test_a_training_that_failed_is_replaced_by_the_next(trained):
    # Of 80 texts, 0.6 has an interval down to 0.49; 0.625 one down to 0.52.
    trained |= {1: [0.5, 0.6, 0.55], 2: [0.625]}
    found = finetuning.finetunings(None, corpus(100), corpus(80), 3)
    assert found["seed"].tolist() == [0, 1, 2, 3]
    assert found["failed"].tolist() == [False, True, False, False]
    assert found["judged"].tolist() == [True, False, True, True]
    assert found["epochs"].tolist() == [2, 2, 1, 2]
    assert found["accuracy"].tolist() == [0.9, 0.6, 0.625, 0.9]
    assert set(found["most_frequent"]) == {0.5}
    said = finetuning.sample(corpus(100), corpus(40), found, of=1000)
    assert said == "40 texts; 3 trainings of 1 to 2 epochs on 100 of 1,000 texts, 1 more failed"


def test_where_all_fail_the_first_is_shown_and_nothing_decided(trained):
    trained |= {seed: [0.5, 0.45] for seed in range(12)}
    found = finetuning.finetunings(None, corpus(100), corpus(80), 5, first=2)
    assert found["seed"].tolist() == list(range(2, 12))
    assert found["judged"].tolist() == [True] + [False] * 9
    rows = finetuning.verdicts(
        [{"fosse-marked-convergence": Estimate(0.4, 0.3, 0.5, 20)}], "one text"
    )
    assert rows["verdict"].tolist() == ["no interval"]


def test_each_of_several_numbers_has_to_lie_beyond_the_bound():
    steps = [
        [Estimate(0.2 + n / 100, 0.1, 0.3, 20), Estimate(0.1 - n / 20, 0.0, 0.2, 20)]
        for n in range(5)
    ]
    found = finetuning.verdicts([{"fosse-constant-growth": of} for of in steps], "five")
    second = seed_and_unit_interval(of[1] for of in steps)
    assert found["value"].item() == pytest.approx(second.value)
    assert found["ci_low"].item() == pytest.approx(second.ci_low)
    assert found["verdict"].item() == "undecided"
    assert found["sample"].item() == "five"


def test_recorded_verdicts_are_those_of_the_page_and_say_what_they_are_on():
    found = finetuning.recorded(["minilm-on-yelphat", "minilm-on-e-snli"], "classification/words")
    assert found["id"].tolist() == ["fosse-few-shared-words"] * 2
    assert found["dataset"].tolist() == ["YelpHat", "e-SNLI"]
    assert set(found["model"]) == {"MiniLM"}
    assert found["sample"].iloc[0] == "386 texts; 5 trainings of at most 5 epochs on 928 texts"
    assert finetuning.recorded([], "classification/words").empty


@pytest.mark.parametrize("name", ["minilm-on-hatexplain", "minilm-on-yelphat", "minilm-on-e-snli"])
def test_recorded_verdicts_know_their_draws(name):
    assert claims.recorded(name)["draws"].isin([5, 20]).all()


TRUE = np.repeat([0, 1], 50)


def on_page(data: str, right: dict[str, int]) -> dict:
    """The page on 100 texts of which so many are classified rightly by each of three classifiers,
    five times.
    """
    test = Corpus("x", [str(i) for i in range(100)], labels=TRUE.tolist(), classes=["a", "b"])

    class Directions:
        over_texts = staticmethod(directions.over_texts)

        @staticmethod
        def predicted(folder, _) -> np.ndarray:
            kind, seed = folder.split()
            found = np.random.default_rng(int(seed)).permutation(100) < right[kind] + int(seed)
            return np.where(found == (TRUE == 0), "a", "b")

    trainings = {
        "folder": [f"encoder {n}" for n in range(5)],
        "epochs": 3,
        "failed": False,
        "judged": True,
    }
    names = {
        "trainings": pd.DataFrame(trainings),
        "seed": 0,
        "data": data,
        "train": test,
        "validation": test,
    }
    names |= {
        "test": test,
        "directions": Directions,
        "self_attention": lambda *_, seed: f"layer {seed}",
    }
    names |= {
        "by_direction": lambda folder: Directions.predicted(folder, test),
        "display": lambda *_: None,
    }
    cells = "folders, given", "levels = {", "named = {"
    return run_cells("classification/accuracy", *cells, **names, splits=lambda _: [test])


def test_both_classifiers_are_tested_on_the_same_texts():
    found = on_page("reviews", {"encoder": 80, "layer": 60})
    means = found["ours"].groupby("classifier")[["accuracy", "agreement"]].mean()
    assert means.loc["MiniLM, fine-tuned"].tolist() == pytest.approx([0.82, 1])
    assert means.loc["nearest direction"].tolist() == pytest.approx([0.82, 1])
    assert means.loc["one layer of self-attention"].tolist() == pytest.approx([0.62, 0.8])
    assert found["judged"].empty


@pytest.mark.parametrize(
    ("data", "layer", "value", "verdict"),
    [
        ("x/hatexplain", 95, 0.15, "holds"),
        ("x/hatexplain", 65, -0.15, "does not hold"),
        ("yelphat", 90, 0.1, "holds"),
        ("yelphat", 60, -0.2, "does not hold"),
    ],
)
def test_an_encoder_and_one_layer_are_judged_on_the_corpus_the_paper_names(
    data, layer, value, verdict
):
    (row,) = on_page(data, {"encoder": 80, "layer": layer})["judged"].itertuples()
    assert row.id == {"yelphat": "fosse-small-gap"}.get(data, "fosse-one-layer-beats-encoder")
    assert (row.value, row.verdict) == (pytest.approx(value), verdict)


def test_one_layer_is_judged_where_it_was_trained_on_enough_texts():
    found = run_cells(
        "classification/accuracy",
        "alone = trials",
        "in_paper = {",
        kinds=["encoder", "", "one layer"],
    )
    rows = pd.DataFrame(found["rows"]).set_index("id")
    assert rows["dataset"].tolist() == ["HateXplain", "YelpHat", "e-SNLI"]
    assert rows.loc["fosse-one-layer-e-snli", "verdict"] == "not applicable"
    assert rows.loc["fosse-one-layer-e-snli", "sample"].endswith(
        "on 18,000 texts, the paper's are some 550,000"
    )
    assert rows.loc["fosse-one-layer-hatexplain", "value"] == pytest.approx(
        found["alone"].query("dataset == 'HateXplain'")["accuracy"].mean(), abs=1e-3
    )


def test_an_accuracy_carries_the_sampling_of_its_test_texts():
    """Five trainings that agree to a tenth of a point are no surer than 1,000 texts allow."""
    alone = pd.DataFrame(
        {"dataset": "HateXplain", "accuracy": [0.6, 0.601, 0.6, 0.599, 0.6], "epochs": 3.0}
    )
    sizes = {"HateXplain": {"train": 15_000, "test": 1000}}
    names = {"kinds": ["", "", "one layer"], "alone": alone, "sizes": sizes}
    (row,) = run_cells("classification/accuracy", "in_paper = {", **names)["rows"]
    assert (row["ci_high"] - row["ci_low"]) / 2 == pytest.approx(
        1.96 * (0.6 * 0.4 / 1000) ** 0.5, rel=0.02
    )


def test_the_nearest_direction_is_that_of_the_mean_of_a_class():
    class Directions:
        class_vectors = staticmethod(
            lambda _, texts: np.array([t.split() for t in texts.items], float)
        )

    train = Corpus("x", ["9 0", "1 1", "0 5"], labels=[0, 1, 1], classes=["a", "b"])
    test = Corpus("x", ["2 0.1", "0.1 0.4", "1 0.3"])
    names = {"train": train, "test": test, "directions": Directions, "load_model": str}
    found = run_cells("classification/accuracy", "def by_direction", **names)["by_direction"]("")
    # The mean direction of b is 67.5 degrees from that of a: half of the way is 33.75.
    assert found.tolist() == ["a", "b", "a"]
