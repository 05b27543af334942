"""Figures of an encoder before and after fine-tuning: what is drawn of tables that were planted."""

import numpy as np
import pandas as pd
import pytest

from analysis_lib import figures
from analysis_lib.papers.fosse.directions import cone


def similarity(curve: list[float]) -> pd.DataFrame:
    hidden = pd.DataFrame({"space": "hidden", "layer": range(len(curve)), "similarity": curve})
    hidden = hidden.assign(ci_low=hidden["similarity"] - 0.02, ci_high=hidden["similarity"] + 0.03)
    return pd.concat([hidden, hidden.assign(space="value", similarity=0.9)])


def test_similarity_is_drawn_before_and_after_with_its_interval():
    figure = figures.similarity_before_and_after(similarity([0.1, 0.2, 0.3]), similarity([0.1, 0.4, 0.7]))
    (axes,) = figure.axes
    drawn = {line.get_label(): (line.get_ydata().tolist(), line.get_linestyle()) for line in axes.lines}
    assert drawn == {"before fine-tuning": ([0.1, 0.2, 0.3], "--"), "after it": ([0.1, 0.4, 0.7], "-")}
    band = axes.collections[1].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == pytest.approx((0.08, 0.73))
    assert axes.get_ylim()[0] == 0
    assert axes.get_xticks().tolist() == [0, 1, 2]


def test_similarity_below_zero_is_not_cut_off():
    figure = figures.similarity_before_and_after(similarity([-0.1, 0.2]), similarity([0.1, 0.4]))
    assert figure.axes[0].get_ylim()[0] < -0.12


@pytest.mark.parametrize(("epochs", "ticks"), [(4, [1, 2, 3, 4]), (20, [5, 10, 15, 20])])
def test_the_epoch_that_is_kept_is_the_first_of_the_best(epochs, ticks):
    accuracy = [0.6, 0.8, 0.7, 0.8] + [0.5] * (epochs - 4)
    log = pd.DataFrame({"epoch": range(1, epochs + 1), "loss": 1.0, "accuracy": accuracy})
    (axes,) = figures.validation_accuracy(log, 0.55).axes
    lines = {line.get_label(): line for line in axes.lines}
    assert lines["validation corpus"].get_ydata().tolist() == accuracy
    assert (lines["kept"].get_xdata()[0], lines["kept"].get_ydata()[0]) == (2, 0.8)
    assert lines["most frequent class"].get_ydata()[0] == 0.55
    assert axes.get_xticks().tolist() == ticks


def planted(own: float, rest: float) -> pd.DataFrame:
    """Twenty utterances of two classes: one cosine to the representative of their own, another to the other."""
    rows = [(r, i, i % 2, own if i % 2 == r else rest) for r in range(2) for i in range(20)]
    return pd.DataFrame(rows, columns=["representative", "utterance", "class", "cosine"])


def test_each_class_has_its_histogram_at_its_cosine():
    figure = figures.cosines_by_class(planted(0.41, 0.42), planted(0.93, -0.31), ["good", "bad"])
    panels = np.reshape(figure.axes, (2, 2))
    assert [axes.get_title() for axes in panels[0]] == ["before fine-tuning", "after it"]
    assert [axes.get_ylabel() for axes in panels[:, 0]] == ["to good", "to bad"]
    for row, own in zip(panels, (0, 1), strict=True):
        peaks = {}
        for label, histogram in zip((0, 1), row[1].collections, strict=True):
            vertices = histogram.get_paths()[0].vertices
            highest = vertices[vertices[:, 1] == vertices[:, 1].max(), 0]
            peaks[label] = (highest.min(), highest.max(), vertices[:, 1].max())
        assert peaks[own] == pytest.approx((0.9, 0.95, 1.0))
        assert peaks[1 - own] == pytest.approx((-0.35, -0.3, 1.0))
    styles = {histogram.get_linestyle()[0][1] is None for histogram in panels[0, 1].collections}
    assert styles == {True, False}
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["good", "bad"]


def test_a_cone_is_drawn_at_its_angle_and_its_outputs_inside():
    angle = np.radians(30)
    values = np.array([[np.cos(angle), np.sin(angle)], [np.cos(angle), -np.sin(angle)]]) * 2
    found = cone(values, np.array([[0.5, 0.5], [0.9, 0.1]]) @ values)
    (axes,) = figures.cones({"planted": found}).axes
    lines = axes.lines
    edges = [line for line in lines if line.get_label() == "widest value"]
    for edge, side in zip(edges, (-1, 1), strict=True):
        x, y = edge.get_xdata()[1], edge.get_ydata()[1]
        assert np.degrees(np.arctan2(side * x, y)) == pytest.approx(30)
    (dots,) = (line for line in lines if line.get_label() == "values $v_j$")
    assert sorted(dots.get_xdata()) == pytest.approx([-1, 1])
    assert dots.get_ydata() == pytest.approx([3**0.5] * 2)
    (marks,) = (line for line in lines if line.get_label() == "outputs $y_i$")
    assert np.abs(marks.get_xdata()) == pytest.approx([0, 0.8])
    assert marks.get_ydata() == pytest.approx([3**0.5] * 2)
    assert axes.get_aspect() == 1


def test_texts_are_printed_as_they_are():
    frame = pd.DataFrame({"class": ["a_b"], "cosine": [0.5], "text": ["Costs $5 | *not* {good}\n# at [all]"]})
    shown = figures.TextTable(frame, "tbl-planted", "Planted.", digits=1)._repr_markdown_()
    assert r"| a\_b | 0.5 | Costs \$5 \| \*not\* \{good\} \# at \[all\] |" in shown
    assert "0.5" in shown
