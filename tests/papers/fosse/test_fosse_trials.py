"""Trials of classifiers: what is drawn, trained and measured."""

from collections import Counter

import pandas as pd
import pytest

from analysis_lib import AnalysisError, load_model, measure
from analysis_lib.corpora import Corpus
from analysis_lib.papers.fosse.splits import splits
from analysis_lib.papers.fosse.trials import (
    VARIANTS,
    dataset_name,
    finetuned,
    record,
    recorded,
    recorded_texts,
    sensitivity,
    trials,
    trials_on,
)
from analysis_lib.training import accuracy, finetune, predict, self_attention
from tests import tiny

TEXTS = ("a warm film", "a lovely thing", "warm and lovely", "a dull film", "a tired thing", "dull and tired")


def labelled(counts: dict[str, int]) -> Corpus:
    classes = sorted(counts)
    labels = [classes.index(name) for name, count in counts.items() for _ in range(count)]
    items = [f"text {i} of {classes[label]}" for i, label in enumerate(labels)]
    return Corpus("planted", items, labels=labels, classes=classes)


def test_trials_are_what_training_and_measuring_give():
    corpus = Corpus("reviews", list(TEXTS), labels=[0, 0, 0, 1, 1, 1], classes=["fresh", "rotten"])
    settings = {"epochs": 3, "patience": 3, "batch": 2, "vocabulary": 60}
    block = {"hidden_size": 8}
    found = trials(
        corpus,
        corpus,
        corpus,
        layers=[1, 2],
        entropy_weights=[0, 0.5],
        seeds=[3],
        block=block,
        progress=False,
        **settings,
    )
    assert [*found.groupby(["layers", "entropy_weight", "seed"]).groups] == [(1, 0.0, 3), (1, 0.5, 3), (2, 0.0, 3)]
    chosen = {**block, "entropy_weight": 0.0}
    folder = self_attention(corpus, corpus, layers=2, block=chosen, seed=3, **settings)
    ours = found[(found["layers"] == 2)].set_index(["quantity", "layer"])["value"]
    tables = measure(
        load_model(str(folder)), corpus, "utterance_similarity,attention_entropy,mean_vector", progress=False
    )
    similar = tables["utterance_similarity"].set_index(["space", "layer"])["similarity"]
    for key in (("key", 1), ("key", 2), ("value", 1), ("value", 2), ("hidden", 0), ("query", 2)):
        assert ours[key] == similar[key]
    norms = tables["mean_vector"].set_index(["space", "layer"])["mean_norm"]
    assert ours["key_norm", 2] == norms["key", 2]
    entropy = tables["attention_entropy"].set_index("layer")["entropy_normalised"]
    assert ours["entropy", 1] == entropy[1]
    rest = ours.reset_index().set_index("quantity")["value"]
    assert rest["accuracy"] == accuracy(predict(folder, corpus))["accuracy"]
    assert 1 <= rest["epochs"] <= 3


REVIEWS = Corpus("reviews", list(TEXTS), labels=[0, 0, 0, 1, 1, 1], classes=["fresh", "rotten"])
SHORT = {"epochs": 1, "patience": 1, "vocabulary": 200, "progress": False}


def test_each_variant_is_trained_and_measured_before_and_after():
    variants = {"small": ({"hidden_size": 8}, {}), "no biases": ({"hidden_size": 8, "bias": False}, {"batch": 3})}
    found = sensitivity(REVIEWS, REVIEWS, REVIEWS, variants=variants, seeds=[0, 1], **SHORT)
    assert set(found["variant"]) == set(variants)
    trained = found[(found["stage"] == "trained") & (found["variant"] == "no biases") & (found["seed"] == 1)]
    block = {"hidden_size": 8, "bias": False, "entropy_weight": 0.0}
    folder = self_attention(
        REVIEWS, REVIEWS, layers=1, block=block, seed=1, epochs=1, patience=1, vocabulary=200, batch=3
    )
    for stage, model in (("trained", str(folder)), ("untrained", f"{folder}:untrained")):
        tables = measure(load_model(model), REVIEWS, "utterance_similarity", progress=False)
        similar = tables["utterance_similarity"].set_index(["space", "layer"])["similarity"]
        ours = found[(found["stage"] == stage) & (found["variant"] == "no biases") & (found["seed"] == 1)]
        assert ours.set_index("quantity")["value"]["key"] == similar["key", 1]
    assert "accuracy" in set(trained["quantity"])
    assert "accuracy" not in set(found[found["stage"] == "untrained"]["quantity"])


def test_every_variant_is_one_that_can_be_trained():
    found = sensitivity(REVIEWS, REVIEWS, REVIEWS, **SHORT)
    assert list(dict.fromkeys(found["variant"])) == list(VARIANTS)
    values = found[(found["stage"] == "untrained") & (found["quantity"] == "value")].set_index("variant")["value"]
    # PyTorch's biases make values alike before any training; without them, tokens are as they are drawn.
    assert values["as here"] > 0.5 > abs(values["no biases"])


def test_a_trial_in_other_processes_is_the_same(monkeypatch):
    block = {"hidden_size": 8}
    one = trials(REVIEWS, REVIEWS, REVIEWS, seeds=[5, 6], block=block, **SHORT)
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    pd.testing.assert_frame_equal(trials(REVIEWS, REVIEWS, REVIEWS, seeds=[5, 6], block=block, **SHORT), one)


def test_a_class_that_only_the_test_split_has_is_refused_before_training(monkeypatch):
    few = Corpus("few", list(TEXTS[:4]), labels=[0, 0, 1, 1], classes=["fresh", "rotten"])
    more = Corpus("more", list(TEXTS), labels=[0, 0, 1, 1, 2, 2], classes=["fresh", "plot", "rotten"])
    monkeypatch.setattr(
        "analysis_lib.papers.fosse.splits.load_corpus", lambda spec: more if spec.endswith("test") else few
    )
    with pytest.raises(AnalysisError, match="x:test has the class plot, which x:train lacks"):
        splits("x")


def test_splits_are_drawn_with_the_balance_of_the_classes():
    for corpus, split, texts in zip(splits("reviews", 8, 6), ("train", "validation", "test"), (8, 2, 6), strict=True):
        assert corpus.name == f"reviews:{split}"
        assert Counter(corpus.labels) == {0: texts / 2, 1: texts / 2}
    assert len(splits("reviews", 8)[2]) == 2152


@pytest.mark.parametrize("limits", [(-1, 0), (0, -1)])
def test_a_negative_limit_is_refused(limits):
    with pytest.raises(AnalysisError, match="give one or more"):
        splits("reviews", *limits)


def test_trials_on_several_corpora_name_them(yelphat):
    found = trials_on([str(yelphat)], layers=[1, 3], shallow=["reviews"], limit=8, block={"hidden_size": 8}, **SHORT)
    assert [*found.groupby(["dataset", "layers"]).groups] == [("reviews", 1), ("yelphat", 1), ("yelphat", 3)]


def test_what_is_recorded_is_read_again(yelphat, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "analysis_lib.papers.fosse.trials.trials", lambda *corpora, **settings: trials(*corpora, **settings, **SHORT)
    )
    monkeypatch.setattr(
        "analysis_lib.papers.fosse.trials.sensitivity",
        lambda *corpora, seeds: sensitivity(*corpora, seeds=seeds, variants={"as here": ({}, {})}, **SHORT),
    )
    folder = tmp_path / "data" / "measurements" / "yelphat"
    record(str(yelphat), folder, layers=[1], entropy_weights=[0.1], seeds=[0])
    assert {path.name for path in folder.iterdir()} == {"trials.csv", "results.json"}
    text = (folder / "results.json").read_text()
    assert str(tmp_path) not in text
    monkeypatch.setattr("analysis_lib.papers.fosse.trials.data_directory", lambda: tmp_path / "data")
    with pytest.raises(AnalysisError, match="no sensitivity"):
        recorded("sensitivity")
    found = recorded()
    assert [*found.groupby(["dataset", "layers", "entropy_weight"]).groups] == [
        ("yelphat", 1, 0.0),
        ("yelphat", 1, 0.1),
    ]
    assert found["layer"].dtype == "Int64"
    assert recorded_texts().iloc[0].to_dict() == {
        "dataset": "yelphat",
        "classes": 2,
        "train": 14,
        "validation": 4,
        "test": 6,
        "seeds": 1,
    }
    record(str(yelphat), folder, layers=[1], seeds=[0], sensitivity_seeds=[2])
    assert recorded("sensitivity").groupby(["variant", "seed", "stage"]).ngroups == 2


@pytest.mark.parametrize(
    ("data", "name"), [("a/b/esnli", "e-snli"), ("e-snli", "e-snli"), ("../yelphat", "yelphat"), ("films", "films")]
)
def test_folders_have_the_names_of_the_paper(data, name):
    assert dataset_name(data) == name


def test_an_encoder_is_fine_tuned_once_per_corpus_and_seed(tmp_path):
    tiny.save(tmp_path / "bert", "bert")
    file = tmp_path / "mine.csv"
    file.write_text("text,label\n" + "".join(f"{word} {i},{word}\n" for i in range(20) for word in ("good", "bad")))
    data, settings = ["reviews", f"{file}:text:label"], {"epochs": 1, "learning_rate": 1e-2}
    found = finetuned(str(tmp_path / "bert"), data, 12, 10, seeds=[3, 4], **settings)
    assert found.groupby(["dataset", "seed", "quantity"]).size().to_dict() == {
        (dataset, seed, quantity): 1
        for dataset in ("reviews", "mine.csv")
        for seed in (3, 4)
        for quantity in ("accuracy", "epochs")
    }
    train, validation, test = splits(data[1], 12, 10, seed=4)
    folder = finetune(load_model(str(tmp_path / "bert")), train, validation, seed=4, **settings)
    wanted = accuracy(predict(folder, test))["accuracy"]
    assert found.set_index(["dataset", "seed", "quantity"]).loc[("mine.csv", 4, "accuracy"), "value"] == wanted


@pytest.mark.parametrize(
    ("data", "seeds", "message"),
    [
        (["reviews", "other/reviews"], [0], "give one or more, each once"),
        ([], [0], "give one or more, each once"),
        (["reviews"], [], "no seed"),
    ],
)
def test_what_cannot_be_fine_tuned_several_times(data, seeds, message):
    with pytest.raises(AnalysisError, match=message):
        finetuned("minilm", data, seeds=seeds)
