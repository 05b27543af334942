"""Numbered tables, words, and the band of an interval."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from analysis_book import figures


def test_a_table_is_numbered_myst_and_plain_html():
    frame = pd.DataFrame(
        {"a | b": ["x|y"], "value": [-0.04], "head": pd.array([pd.NA], dtype="Int64")}
    )
    table = figures.Table(frame, "tbl-x", "A caption.", digits=1)
    markdown = table._repr_markdown_()
    assert markdown.startswith(":::{table} A caption.\n:name: tbl-x\n")
    # No minus before a zero, no bar that would end a cell, a dash for what is missing.
    assert r"| x\|y | 0.0 | – |" in markdown
    assert r"a \| b" in markdown
    assert "<table" in table._repr_html_()


def test_a_band_breaks_between_units_and_keeps_its_colour():
    table = pd.DataFrame(
        {"layer": [3, 0, 1, 2], "stack": ["decoder", "encoder", "encoder", "decoder"], "model": "m"}
    )
    table = table.assign(ci_low=table["layer"] - 0.5, ci_high=table["layer"] + 0.5)
    figure, axes = plt.subplots()
    figures.band("layer", data=table, hue="model", units="stack", ax=axes)
    decoder, encoder = (band.get_paths()[0].vertices for band in axes.collections)
    assert (encoder[:, 0].min(), encoder[:, 0].max()) == (0, 1)
    assert (decoder[:, 0].min(), decoder[:, 1].min(), decoder[:, 1].max()) == (2, 1.5, 3.5)
    np.testing.assert_array_equal(*(band.get_facecolor() for band in axes.collections))
    plt.close(figure)


def test_texts_are_printed_as_they_are():
    frame = pd.DataFrame(
        {"class": ["a_b"], "cosine": [0.5], "text": ["Costs $5 | *not* {good}\n# at [all]"]}
    )
    shown = figures.Table(frame, "tbl-planted", "Planted.", digits=1)._repr_markdown_()
    assert r"| a\_b | 0.5 | Costs \$5 \| \*not\* \{good\} \# at \[all\] |" in shown


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("It reaches **0.72** in `[CLS]`.", "It reaches 0.72 in [CLS]."),
        ("See {doc}`checks`, {ref}`how <notation-verdict>`.", "See checks, how."),
        ('<a href="#fig&amp;a=1">the heads</a> &amp; more', "the heads & more"),
        (r"of a\_b: 2 \* 3, \[x\]", "of a_b: 2 * 3, [x]"),
        (":::{note}\nCut there.\n:::", "Cut there."),
        ("[the page](https://example.org/a_b) at 3 < 4", "the page at 3 < 4"),
        ("2 * 3 and a_b stay", "2 * 3 and a_b stay"),
    ],
)
def test_markdown_is_printed_without_its_marks(text, words):
    shown = figures.Markdown(text)
    assert repr(shown) == words
    assert shown._repr_markdown_() == text
