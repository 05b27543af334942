"""Trials of classifiers: what is drawn, trained and measured."""

import json
from collections import Counter

import pandas as pd
import pytest

from analysis_book.papers.fosse import trials as runs
from analysis_book.papers.fosse.splits import splits
from analysis_book.papers.fosse.trials import VARIANTS, record, recorded, trials
from analysis_book.training import accuracy, predict, self_attention
from analysis_lib import AnalysisError, load_model, measure
from analysis_lib.corpora import Corpus, title
from analysis_lib.measurement import shipping

TEXTS = (
    "a warm film",
    "a lovely thing",
    "warm and lovely",
    "a dull film",
    "a tired thing",
    "dull and tired",
)


REVIEWS = Corpus("reviews", list(TEXTS), labels=[0, 0, 0, 1, 1, 1], classes=["fresh", "rotten"])
SHORT = {"epochs": 1, "patience": 1, "vocabulary": 200}
SMALL = {"block": {"hidden_size": 8}}


@pytest.fixture
def reviews(monkeypatch) -> None:
    """The corpus ``reviews`` is six texts."""
    monkeypatch.setattr(runs, "splits", lambda data, limit, test=None: (REVIEWS, REVIEWS, REVIEWS))


def classifiers(**values: list) -> list[dict]:
    """One classifier of the reviews for each of these values."""
    return [{"data": "reviews", name: value} for name, many in values.items() for value in many]


def test_trials_are_what_training_and_measuring_give(reviews):
    settings = {"epochs": 3, "patience": 3, "batch": 2, "vocabulary": 60}
    asked = [
        {"data": "reviews", "seed": 3, **rest}
        for rest in ({"layers": 2}, {"entropy_weight": 0.5}, {"layers": 2})
    ]
    found = trials(asked, **SMALL, **settings)
    assert [*found.groupby(["layers", "entropy_weight", "seed"]).groups] == [
        (1, 0.5, 3),
        (2, 0.0, 3),
    ]
    chosen = {**SMALL["block"], "entropy_weight": 0.0}
    folder = self_attention(REVIEWS, REVIEWS, layers=2, block=chosen, seed=3, **settings)
    ours = found[(found["layers"] == 2) & (found["stage"] == "kept")].set_index(
        ["quantity", "layer"]
    )["value"]
    tables = measure(
        load_model(str(folder)),
        REVIEWS,
        "utterance_similarity,attention_entropy,mean_vector",
        progress=False,
    )
    similar = tables["utterance_similarity"].set_index(["space", "layer"])["similarity"]
    for key in (("key", 1), ("key", 2), ("value", 1), ("value", 2), ("hidden", 0), ("query", 2)):
        assert ours[key] == similar[key]
    norms = tables["mean_vector"].set_index(["space", "layer"])["mean_norm"]
    assert ours["key_norm", 2] == norms["key", 2]
    entropy = tables["attention_entropy"].set_index("layer")["entropy_normalised"]
    assert ours["entropy", 1] == entropy[1]
    rest = ours.reset_index().set_index("quantity")["value"]
    assert rest["accuracy"] == accuracy(predict(folder, REVIEWS))["accuracy"]
    assert 1 <= rest["epochs"] <= 3


def test_each_variant_is_measured_as_it_starts_where_it_is_best_and_at_the_end(reviews):
    settings = {**SHORT, "epochs": 3, "patience": 3}
    found = trials(classifiers(variant=[*VARIANTS]), **settings)
    assert list(dict.fromkeys(found["variant"])) == list(VARIANTS)
    block = {"hidden_size": 128, "entropy_weight": 0.0}
    folder = self_attention(REVIEWS, REVIEWS, layers=1, block=block, seed=0, **settings)
    ours = found[found["variant"] == "width 128"].set_index(["stage", "quantity"])["value"]
    for stage, home in (
        ("untrained", folder / "initial"),
        ("kept", folder),
        ("last", folder / "last"),
    ):
        tables = measure(load_model(str(home)), REVIEWS, "utterance_similarity", progress=False)
        similar = tables["utterance_similarity"].set_index(["space", "layer"])["similarity"]
        assert ours[stage, "key"] == similar["key", 1]
        assert ours[stage, "accuracy"] == accuracy(predict(home, REVIEWS))["accuracy"]
    log = pd.read_csv(folder / "epochs.csv")
    assert ours["untrained", "epochs"] == 0
    assert ours["kept", "epochs"] == log["epoch"][log["accuracy"].idxmax()]
    assert ours["last", "epochs"] == 3
    values = found[(found["stage"] == "untrained") & (found["quantity"] == "value")].set_index(
        "variant"
    )["value"]
    # PyTorch's biases make values alike before any training; with BERT's, which are zero, tokens
    # are as they are drawn.
    assert values["PyTorch's linear layers"] > 0.5 > abs(values["BERT's initialisation"])


def test_a_classifier_starts_where_its_own_seed_starts_it(reviews):
    starts = [
        self_attention(REVIEWS, REVIEWS, seed=seed, **SMALL, **SHORT) / "initial" for seed in (0, 1)
    ]
    first, second = (load_model(str(home)).model.word_embeddings.weight for home in starts)
    assert not first.equal(second)


def test_a_trial_in_other_processes_is_the_same(reviews, monkeypatch, copied_workers):
    one = trials(classifiers(seed=[5, 6]), **SMALL, **SHORT)
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    pd.testing.assert_frame_equal(trials(classifiers(seed=[5, 6]), **SMALL, **SHORT), one)


def test_a_class_that_only_the_test_split_has_is_refused_before_training(monkeypatch):
    few = Corpus("few", list(TEXTS[:4]), labels=[0, 0, 1, 1], classes=["fresh", "rotten"])
    more = Corpus(
        "more", list(TEXTS), labels=[0, 0, 1, 1, 2, 2], classes=["fresh", "plot", "rotten"]
    )
    monkeypatch.setattr(
        "analysis_book.papers.fosse.splits.load_corpus",
        lambda spec: more if spec.endswith("test") else few,
    )
    with pytest.raises(AnalysisError, match="x:test has the class plot, which x lacks"):
        splits("x")


def test_splits_are_drawn_with_the_balance_of_the_classes():
    for corpus, split, texts in zip(
        splits("reviews", 8, 6), ("train", "validation", "test"), (8, 2, 6), strict=True
    ):
        assert corpus.name == f"reviews:{split}"
        assert Counter(corpus.labels) == {0: texts / 2, 1: texts / 2}
    assert len(splits("reviews", 8)[2]) == 2152


@pytest.mark.parametrize("limits", [(-1, 0), (0, -1)])
def test_a_negative_limit_is_refused(limits):
    with pytest.raises(AnalysisError, match="is -1: give a whole number, 0 or more"):
        splits("reviews", *limits)


def test_trials_on_several_corpora_name_them(yelphat):
    asked = [
        {"data": str(yelphat), "layers": 1},
        {"data": str(yelphat), "layers": 3},
        {"data": "reviews"},
    ]
    found = trials(asked, limit=8, **SMALL, **SHORT)
    assert [*found.groupby(["dataset", "layers"]).groups] == [
        ("YelpHat", 1),
        ("YelpHat", 3),
        ("reviews", 1),
    ]


@pytest.fixture
def small(yelphat, tmp_path, monkeypatch):
    """What is recorded, of small classifiers and one variant, and where."""
    monkeypatch.setattr(runs, "VARIANTS", {"BERT's initialisation": {}})
    monkeypatch.setattr(
        runs, "trials", lambda asked, **rest: trials(asked, **rest, **SMALL, **SHORT)
    )
    monkeypatch.setattr(runs.shipping, "home", lambda: tmp_path / "data" / "measurements")
    folder = tmp_path / "data" / "measurements" / "yelphat"
    record(str(yelphat), folder, layers=[1], entropy_weights=[0.1], seeds=[0])
    return folder


def test_what_is_recorded_is_read_again(small, yelphat, tmp_path):
    assert {path.name for path in small.glob("[!.]*")} == {"trials.csv", "results.json"}
    assert str(tmp_path) not in (small / "results.json").read_text()
    found = recorded()
    assert [*found.groupby(["dataset", "layers", "entropy_weight"]).groups] == [
        ("YelpHat", 1, 0.0),
        ("YelpHat", 1, 0.1),
    ]
    assert found["layer"].dtype == "Int64"
    about = shipping.descriptions("results.json")["yelphat"]
    assert about["texts"] == {"train": 14, "validation": 4, "test": 6}
    assert len(about["classes"]) == 2
    record(str(yelphat), small, layers=[1], entropy_weights=[], seeds=[0], sensitivity_seeds=[2])
    assert recorded().groupby(["variant", "seed", "stage"]).ngroups == 6


def test_recorded_results_know_the_code_that_made_them(small):
    assert runs.code_warning() == ""
    results = small / "results.json"
    about = json.loads(results.read_text())
    about["formulas"]["training"] += 1
    results.write_text(json.dumps(about))
    assert "The tables of YelpHat were recorded by another version" in runs.code_warning()


@pytest.mark.parametrize(
    ("data", "name"),
    [("a/b/esnli", "e-SNLI"), ("e-snli", "e-SNLI"), ("../yelphat", "YelpHat"), ("films", "films")],
)
def test_folders_have_the_names_of_the_paper(data, name):
    assert title(data) == name


@pytest.mark.parametrize("data", [["reviews", "other/reviews"], []])
def test_corpora_that_cannot_be_told_apart(data):
    with pytest.raises(AnalysisError, match="give one or more, of different names"):
        trials({"data": spec} for spec in data)
