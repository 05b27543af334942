"""Cones, and tables of texts: what is drawn and printed is what was planted."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from analysis_lib import figures


def test_a_cone_is_drawn_at_its_angle_and_its_outputs_inside():
    columns = ["vector", "angle", "along", "aside"]
    rows = [
        ("value", 30, 3**0.5, 1),
        ("value", 30, 3**0.5, -1),
        ("output", 0, 3**0.5, 0),
        ("output", 24.8, 3**0.5, 0.8),
    ]
    (axes,) = figures.cones({"planted": pd.DataFrame(rows, columns=columns)}).axes
    plt.close("all")
    lines = {line.get_label(): line for line in axes.lines}
    x, y = lines["widest value"].get_data()
    assert np.degrees(np.arctan2(x, y))[[0, 2]] == pytest.approx([-30, 30])
    points = {dots.get_label(): dots.get_offsets() for dots in axes.collections}
    assert points["values $v_j$"].tolist() == [pytest.approx([side, 3**0.5]) for side in (1, -1)]
    assert points["outputs $y_i$"].tolist() == [pytest.approx([side, 3**0.5]) for side in (0, 0.8)]
    rays = [line.get_xydata().tolist() for line in axes.lines[:2]]
    assert rays == [[[0, 0], pytest.approx([side, 3**0.5])] for side in (1, -1)]
    assert axes.get_aspect() == 1
    assert axes.get_title() == "planted"


def test_texts_are_printed_as_they_are():
    frame = pd.DataFrame({"class": ["a_b"], "cosine": [0.5], "text": ["Costs $5 | *not* {good}\n# at [all]"]})
    shown = figures.TextTable(frame, "tbl-planted", "Planted.", digits=1)._repr_markdown_()
    assert r"| a\_b | 0.5 | Costs \$5 \| \*not\* \{good\} \# at \[all\] |" in shown
