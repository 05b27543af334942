"""One vector per text: the first, the last, the mean of those that count."""

import inspect

import numpy as np
import pytest
import reference
import tiny
from clouds import CLS, OTHER, SEP, accumulated, activations_of, tokens_of
from reference import assert_agree

from analysis_lib import AnalysisError, load_model, measure, metrics
from analysis_lib.capture import Vectors
from analysis_lib.corpora import Corpus
from analysis_lib.measurement.versions import metric_identity, readable_parameters
from analysis_lib.metrics.accumulator import VECTOR_SPACES

FLOAT64 = (1e-9, 1e-12)
OF_TEXTS = ("first", "last", "mean")
# Metrics of vectors that neither compare those of one text nor look at their positions.
OF_VECTORS = [
    name
    for name, metric in metrics.METRICS.items()
    if metric.needs <= {*VECTOR_SPACES}
    and not metric.of_pairs_within_utterances
    and name != "resultant_by_position"
]


def test_one_vector_of_each_text_by_hand():
    # Of the second text, the first and the last token do not count.
    texts = [np.array([[1.0, 0], [3, 2]]), np.array([[9.0, 9], [0, 4], [2, 0], [9, 9]])]
    activations = activations_of(texts, types=[[OTHER, OTHER], [CLS, OTHER, OTHER, SEP]])
    tokens = tokens_of([[OTHER, OTHER], [CLS, OTHER, OTHER, SEP]], special_tokens=False)
    vectors = Vectors(activations.spaces["hidden"].values, tokens)
    wanted = {"first": [[1, 0], [0, 4]], "last": [[3, 2], [2, 0]], "mean": [[2, 1], [1, 2]]}
    for name, values in wanted.items():
        reduced = vectors.of_texts(name)
        assert reduced.values[:, 0, 0].tolist() == values, name
        assert reduced.counts.tolist() == [1, 1]
        assert vectors.of_texts(name) is reduced
    assert vectors.of_texts("token") is vectors


def test_a_text_of_which_nothing_counts_has_no_vector():
    tokens = tokens_of([[CLS, SEP], [CLS, OTHER]], special_tokens=False)
    values = activations_of([np.ones((2, 3))] * 2).spaces["hidden"].values
    for name in OF_TEXTS:
        assert Vectors(values, tokens).of_texts(name).counts.tolist() == [0, 1]


def test_types_are_those_of_the_chosen_token():
    activations = activations_of([np.eye(3)], types=[[CLS, OTHER, SEP]])
    for name, kind in (("first", "cls"), ("last", "sep"), ("mean", "other")):
        table = accumulated(metrics.NormsByType(vectors_of=name), activations).table()
        assert table["token_type"].tolist() == ["all", kind]


@pytest.mark.parametrize("vectors_of", OF_TEXTS)
@pytest.mark.parametrize("architecture", ["bert", "qwen3"])
def test_tables_of_texts_are_those_of_the_reference(architecture, vectors_of, tiny_folder):
    folder = tiny_folder(architecture)
    corpus = Corpus("texts", tiny.TEXTS)
    model = load_model(str(folder), dtype="float64")
    naive = reference.Reference(folder, corpus.texts, vectors_of=vectors_of)
    others = {"cosine_by_dimension", "rotary_pairs", "qk_alignment_unrotated"}
    names = [name for name in OF_VECTORS if hasattr(naive, name) and name not in others]
    assert {"anisotropy", "spectrum", "qk_alignment", "dimension_means"} <= {*names}
    wanted = [metrics.METRICS[name](vectors_of=vectors_of) for name in names]
    tables = measure(model, corpus, wanted, progress=False)
    assert_agree(tables, {name: getattr(naive, name)() for name in names}, FLOAT64)


@pytest.mark.parametrize("name", OF_VECTORS)
def test_every_metric_of_vectors_takes_it_and_is_another_with_it(name):
    kind = metrics.METRICS[name]
    assert "vectors_of" in inspect.signature(kind).parameters
    usual, last = kind(), kind(vectors_of="last")
    assert metric_identity(usual) != metric_identity(last)
    assert readable_parameters(last)["vectors_of"] == "last"
    # Tables that were stored before there was such a parameter stay valid.
    assert metric_identity(usual) == metric_identity(kind(vectors_of="token"))
    assert "vectors_of" not in readable_parameters(usual)
    assert last.fresh().vectors_of == "last"


@pytest.mark.parametrize("name", ["utterance_similarity", "attention_entropy"])
def test_metrics_without_a_vector_for_each_text_refuse_it(name):
    with pytest.raises(AnalysisError, match=f"{name} has no vector for each text"):
        metrics.METRICS[name](vectors_of="mean")


def test_an_unknown_choice_is_one_clear_line():
    with pytest.raises(AnalysisError, match="vectors_of is 'middle': give one of token, first"):
        metrics.Anisotropy(vectors_of="middle")
