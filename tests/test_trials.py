"""Trials of classifiers: what is drawn, trained and measured, and the published numbers beside."""

from collections import Counter

import numpy as np
import pandas as pd
import pytest

from analysis_lib import AnalysisError, load_model, measure
from analysis_lib.classifiers import beside_published, stratified, trials
from analysis_lib.corpora import Corpus
from analysis_lib.training import accuracy, predict, self_attention

TEXTS = ("a warm film", "a lovely thing", "warm and lovely", "a dull film", "a tired thing", "dull and tired")


def labelled(counts: dict[str, int]) -> Corpus:
    classes = sorted(counts)
    labels = [classes.index(name) for name, count in counts.items() for _ in range(count)]
    items = [f"text {i} of {classes[label]}" for i, label in enumerate(labels)]
    return Corpus("planted", items, labels=labels, classes=classes)


@pytest.mark.parametrize(
    ("utterances", "drawn"),
    [(10, {"a": 6, "b": 3, "c": 1}), (11, {"a": 7, "b": 3, "c": 1}), (1, {"a": 1}), (300, {"a": 60, "b": 30, "c": 10})],
)
def test_a_draw_keeps_the_balance_of_the_classes(utterances, drawn):
    corpus = labelled({"a": 60, "b": 30, "c": 10})
    found = stratified(corpus, utterances, seed=1)
    assert Counter(found.classes[label] for label in found.labels) == drawn
    places = [corpus.items.index(item) for item in found.items]
    assert places == sorted(set(places))
    assert all(corpus.labels[place] == label for place, label in zip(places, found.labels, strict=True))
    assert stratified(corpus, utterances, seed=1).items == found.items


def test_a_draw_without_classes_is_refused():
    with pytest.raises(AnalysisError, match="with classes"):
        stratified(Corpus("bare", list(TEXTS)), 2)


def test_trials_are_what_training_and_measuring_give():
    corpus = Corpus("reviews", list(TEXTS), labels=[0, 0, 0, 1, 1, 1], classes=["fresh", "rotten"])
    settings = {"epochs": 3, "patience": 3, "batch": 2, "vocabulary": 60}
    block = {"hidden_size": 8}
    found = trials(
        corpus,
        corpus,
        corpus,
        layers=[1, 2],
        entropy_weights=[0.0, 0.5],
        seeds=[3],
        block=block,
        progress=False,
        **settings,
    )
    assert len(found.groupby(["layers", "entropy_weight", "seed"])) == 4
    chosen = {**block, "entropy_weight": 0.5}
    folder = self_attention(corpus, corpus, layers=2, block=chosen, seed=3, **settings)
    ours = found[(found["layers"] == 2) & (found["entropy_weight"] == 0.5)].set_index(["quantity", "layer"])["value"]
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


def test_published_numbers_stand_beside_ours_in_units_of_the_spread():
    found = pd.DataFrame({"layer": [1, 1, 1, 2, 2], "quantity": "key", "value": [0.2, 0.4, 0.6, 0.5, 0.5]})
    published = pd.DataFrame({"layer": [1, 2], "quantity": "key", "published": [0.8, 0.4]})
    both = beside_published(found, published, ["layer", "quantity"]).set_index("layer")
    assert both.loc[1, ["mean", "spread", "seeds", "difference"]].tolist() == pytest.approx([0.4, 0.2, 3, -2.0])
    assert np.isnan(both.loc[2, "difference"])
