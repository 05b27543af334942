"""The unit of independence: groups are unions of whole units, and intervals over articles are those
of a bootstrap.
"""

import numpy as np
import pandas as pd
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from analysis_book.papers.fosse.directions import class_vectors
from analysis_lib import load_corpus, load_model, measure, measure_vectors
from analysis_lib.corpora import Corpus
from analysis_lib.metrics.accumulator import GROUPS
from analysis_lib.metrics.anisotropy import mean_pair_cosine
from analysis_lib.metrics.intervals import jackknife_interval


@given(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=60), st.integers(1, 20))
def test_a_group_is_a_union_of_whole_units_in_blocks_of_neighbours(units, count):
    groups = Corpus("x", units, units=units).groups(count)
    of_unit = dict(zip(units, groups, strict=True))
    assert groups == [of_unit[unit] for unit in units]
    # In the order in which units first occur, their groups never go back, and none is left out.
    in_order = [of_unit[unit] for unit in dict.fromkeys(units)]
    assert in_order == sorted(in_order)
    assert set(in_order) == set(range(min(count, len(in_order))))


@given(st.integers(1, 200))
def test_items_without_a_unit_are_units_in_blocks(size):
    groups = Corpus("x", range(size)).groups(GROUPS)
    assert groups == sorted(groups)
    sizes = np.bincount(groups)
    assert len(sizes) == min(size, GROUPS)
    assert sizes.max() - sizes.min() <= 1


def test_the_order_of_classes_makes_no_groups_of_one_class():
    """Ten digits, spoken forty times each: digit by digit, or all digits in turn."""
    for labels in (np.repeat(range(10), 40), np.tile(range(10), 40)):
        corpus = Corpus("digits", range(400), labels=labels.tolist(), classes=[*"0123456789"])
        groups = np.array(corpus.groups(GROUPS))
        for group in range(GROUPS):
            assert np.bincount(labels[groups == group]).tolist() == [2] * 10


@pytest.mark.parametrize(
    ("data", "units"),
    [
        ("wikipedia", 106),
        ("news", 300),
        ("reviews", 508),
        ("speech-clips", 5),
        ("dialogues", 19),
        ("photographs", 20),
    ],
)
def test_bundled_corpora_carry_their_units(data, units):
    corpus = load_corpus(data)
    assert len(corpus.units) == len(corpus)
    assert len(set(corpus.units)) == units
    assert set(corpus.groups(GROUPS)) == set(range(min(units, GROUPS)))
    assert corpus.take([3, 0]).units == [corpus.units[3], corpus.units[0]]
    assert set(load_corpus(data, limit=4, seed=1).units) <= set(corpus.units)


def test_short_sentences_are_short():
    short = load_corpus("wikipedia:short")
    assert {len(text.split()) for text in short.texts} == set(range(3, 11))
    assert set(short.texts) < set(load_corpus("wikipedia").texts)


def test_intervals_over_articles_are_those_of_a_bootstrap_over_articles():
    """The mean cosine of sentence vectors of MiniLM: half-widths of the jackknife, and of 2,000
    draws of articles.
    """
    corpus = load_corpus("wikipedia:short", limit=600, seed=0)
    vectors = class_vectors(load_model("minilm"), corpus)
    units = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    def reach(groups: np.ndarray) -> float:
        sums = np.stack([units[groups == group].sum(0) for group in range(GROUPS)])
        sizes = np.bincount(groups).astype(float)
        left_out = mean_pair_cosine(sums.sum(0) - sums, sizes.sum() - sizes)
        whole = np.asarray(mean_pair_cosine(sums.sum(0), np.array(sizes.sum())))
        low, high = jackknife_interval(whole, left_out)
        return float(high - low) / 2

    articles = np.unique(corpus.units, return_inverse=True)[1]
    sums = np.stack([units[articles == article].sum(0) for article in range(articles.max() + 1)])
    sizes = np.bincount(articles).astype(float)
    drawn = (
        np.random.default_rng(0)
        .multinomial(len(sizes), np.full(len(sizes), 1 / len(sizes)), 2000)
        .astype(float)
    )
    # An article that is drawn twice would meet itself: pairs within an article are those of the
    # sample.
    cosines = (
        ((drawn @ sums) ** 2).sum(1)
        - drawn**2 @ (sums**2).sum(1)
        + drawn @ ((sums**2).sum(1) - sizes)
    ) / ((drawn @ sizes) ** 2 - drawn**2 @ sizes**2 + drawn @ (sizes**2 - sizes))
    bootstrap = 1.96 * cosines.std()
    assert 0.6 < reach(np.array(corpus.groups(GROUPS))) / bootstrap < 1.6
    # Sentences of each article in every group: what an article shares drops out, and the interval
    # is too narrow.
    assert reach(np.arange(len(corpus)) % GROUPS) / bootstrap < 0.6


def test_units_of_a_table_are_named_to_measure_and_in_its_run(tiny_folder, tmp_path):
    table = pd.DataFrame(
        {"text": tiny.TEXTS[:8], "doc": ["a", "a", "b", None, "b", "c", None, "c"]}
    )
    table.to_csv(tmp_path / "table.csv", index=False)
    folder = str(tiny_folder("bert"))
    given = {"metrics": "anisotropy", "progress": False}
    at_hand = measure(folder, table, column="text", units="doc", **given)
    in_file = measure(folder, f"{tmp_path / 'table.csv'}:text", units="doc", **given)
    pd.testing.assert_frame_equal(at_hand["anisotropy"], in_file["anisotropy"])
    # Three documents, and two texts without one.
    assert [(t.run["unit_column"], t.run["units"]) for t in (at_hand, in_file)] == [("doc", 5)] * 2
    assert at_hand.groups == [0, 1, 2, 3, 4]
    alone = measure(folder, table, column="text", **given)
    assert (alone.run["unit_column"], alone.run["units"]) == (None, 8)
    assert not alone["anisotropy"]["ci_low"].equals(at_hand["anisotropy"]["ci_low"])
    # What is kept of the same groups says by which column they are known now.
    renamed = table.rename(columns={"doc": "patent"})
    assert (
        measure(folder, renamed, column="text", units="patent", **given).run["unit_column"]
        == "patent"
    )


def test_vectors_without_a_unit_are_units_of_their_own():
    draw = np.random.default_rng(0)
    given = ({0: draw.normal(size=(6, 4))}, [1] * 6, "anisotropy")
    tables = measure_vectors(*given, units=["a", None, "a", float("nan"), "b", "b"], progress=False)
    assert (tables.groups, tables.run["units"]) == ([0, 1, 2, 3], 4)


def test_few_units_are_said(tiny_folder):
    model = load_model(str(tiny_folder("bert")))
    texts = [f"Text {number} of some" for number in range(40)]
    few = "its intervals rest on 20 independent units, and are rough"
    one = "its texts are one unit, so that there are no intervals"
    for units, notes in (
        (range(40), set()),
        ([i // 2 for i in range(40)], {few}),
        ([0] * 40, {one}),
    ):
        corpus = Corpus("some", texts, units=[str(unit) for unit in units])
        run = measure(model, corpus, "mean_vector", progress=False).run
        assert run["units"] == len({*units})
        assert {few, one} & {*run["notes"]} == notes
