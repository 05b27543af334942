"""Numbered tables, and the band of an interval."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from analysis_lib import figures


def test_a_table_is_numbered_myst_and_plain_html():
    frame = pd.DataFrame({"a | b": ["x|y"], "value": [-0.04], "head": pd.array([pd.NA], dtype="Int64")})
    table = figures.Table(frame, "tbl-x", "A caption.", digits=1)
    markdown = table._repr_markdown_()
    assert markdown.startswith(":::{table} A caption.\n:name: tbl-x\n")
    # No minus before a zero, no bar that would end a cell, a dash for what is missing.
    assert r"| x\|y | 0.0 | – |" in markdown
    assert r"a \| b" in markdown
    assert "<table" in table._repr_html_()


def test_a_band_breaks_between_units_and_keeps_its_colour():
    table = pd.DataFrame({"layer": [3, 0, 1, 2], "stack": ["decoder", "encoder", "encoder", "decoder"], "model": "m"})
    table = table.assign(ci_low=table["layer"] - 0.5, ci_high=table["layer"] + 0.5)
    figure, axes = plt.subplots()
    figures.band("layer", data=table, hue="model", units="stack", ax=axes)
    decoder, encoder = (band.get_paths()[0].vertices for band in axes.collections)
    assert (encoder[:, 0].min(), encoder[:, 0].max()) == (0, 1)
    assert (decoder[:, 0].min(), decoder[:, 1].min(), decoder[:, 1].max()) == (2, 1.5, 3.5)
    np.testing.assert_array_equal(*(band.get_facecolor() for band in axes.collections))
    plt.close(figure)


def test_texts_are_printed_as_they_are():
    frame = pd.DataFrame({"class": ["a_b"], "cosine": [0.5], "text": ["Costs $5 | *not* {good}\n# at [all]"]})
    shown = figures.TextTable(frame, "tbl-planted", "Planted.", digits=1)._repr_markdown_()
    assert r"| a\_b | 0.5 | Costs \$5 \| \*not\* \{good\} \# at \[all\] |" in shown
