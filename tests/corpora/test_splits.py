"""Which items are drawn: the classes keep their shares, splits do not overlap, and draws stay what
they were.
"""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis_book.papers.fosse.splits import drawn, stratified
from analysis_lib import AnalysisError, Corpus, load_corpus
from analysis_lib.corpora.corpus import Example
from analysis_lib.corpora.splits import SPLITS, divided, division

LABELS = st.lists(st.sampled_from("abc"), min_size=1, max_size=60)


@given(LABELS, st.floats(0, 0.5), st.floats(0, 0.5))
def test_splits_are_apart_and_whole_and_keep_the_shares(labels, validation, test):
    parts = {split: division(labels, "abc", split, validation, test) for split in SPLITS}
    assert sorted(itertools.chain(*parts.values())) == list(range(len(labels)))
    for name, count in Counter(labels).items():
        sizes = {split: sum(labels[i] == name for i in part) for split, part in parts.items()}
        # A half may be rounded up twice.
        assert sizes["test"] == round(test * count)
        assert sizes["validation"] == min(round(validation * count), count - sizes["test"])


def test_rows_of_a_split_are_in_the_order_of_the_corpus():
    rows = [Example(f"text {i}", "ab"[i % 3 == 0]) for i in range(40)]
    assert [row.item for row in divided(rows, "test", 0.1, 0.2)] == sorted(
        (rows[i].item for i in division([row.label for row in rows], "ab", "test", 0.1, 0.2)),
        key=lambda text: int(text.split()[1]),
    )


def test_at_most_so_many_of_a_class():
    kept = [
        division("a" * 30 + "b" * 12, "ab", split, 0.1, 0.2, rounding=int, most=12)
        for split in SPLITS
    ]
    assert [len(part) for part in kept] == [18, 2, 4]


@given(LABELS, st.integers(1, 70), st.integers(0, 5))
def test_stratified_samples_keep_the_shares(labels, count, seed):
    classes = sorted(set(labels))
    texts = [f"{number:04}" for number in range(len(labels))]
    corpus = Corpus("c", texts, labels=[classes.index(name) for name in labels], classes=classes)
    found = stratified(corpus, count, seed)
    assert len(found) == min(count, len(labels))
    assert list(found.items) == sorted(set(found.items))
    assert list(found.labels) == [corpus.labels[int(text)] for text in found.items]
    for label, size in Counter(corpus.labels).items():
        assert abs(found.labels.count(label) - len(found) * size / len(labels)) < 1


def test_stratified_samples_need_classes():
    with pytest.raises(AnalysisError, match="a corpus with classes"):
        stratified(Corpus("bare", ["a", "b"]), 1)
    with pytest.raises(AnalysisError, match="0 items of c"):
        stratified(Corpus("c", ["a"], labels=[0], classes=["a"]), 0)


def test_every_item_of_a_class_is_drawn_as_often():
    counts = sum(
        np.bincount(drawn("aaaab", {"a": 2, "b": 1}, seed), minlength=5) for seed in range(2000)
    )
    # Four standard deviations of a binomial.
    np.testing.assert_allclose(counts[:4] / 2000, 0.5, atol=0.045)
    assert counts[4] == 2000


@pytest.mark.parametrize(
    ("spec", "size", "sha256"),
    [
        ("reviews:train", 7540, "1483ba4b8067dcb1"),
        ("films:validation", 324, "cad57730b1e82a2f"),
        ("articles:test", 3656, "3c8e9308883b5d58"),
        ("digits", 900, "29cd9f4d14cc0fb4"),
    ],
)
def test_the_draws_are_those_of_the_shipped_measurements(spec, size, sha256):
    corpus = load_corpus(spec)
    assert (len(corpus), corpus.sha256[:16]) == (size, sha256)


def test_stratified_draws_are_those_of_the_shipped_measurements():
    assert stratified(load_corpus("articles:train"), 50, seed=2).sha256[:16] == "e4d290254c7ab9c2"
