"""Figures of the part on classification, of an encoder before and after it was fine-tuned."""

import re
from collections.abc import Mapping, Sequence

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from analysis_lib.figures.base import COLOURS, THEME, WIDTH, PageFigure, layer_ticks, legend_below, stacked_axes
from analysis_lib.figures.tables import Table

_STAGES = {
    "before": ("before fine-tuning", {"color": COLOURS[0], "marker": "o", "linestyle": "--"}),
    "after": ("after it", {"color": COLOURS[1], "marker": "s", "linestyle": "-"}),
}
_LINES = ("-", "--", ":", "-.")
_BIN = 0.05


@mpl.rc_context(THEME)
def similarity_before_and_after(before: pd.DataFrame, after: pd.DataFrame) -> Figure:
    """Similarity inside an utterance against the layer, before and after fine-tuning, with 95 % intervals as bands.

    Args:
        before, after: ``utterance_similarity`` tables; the hidden states are shown.
    """
    figure, (axes,) = stacked_axes(height=3.6)
    for table, (label, look) in zip((before, after), _STAGES.values(), strict=True):
        hidden = table[table["space"] == "hidden"]
        axes.plot(hidden["layer"], hidden["similarity"], label=label, markersize=5, **look)
        band = {"color": look["color"], "alpha": 0.25, "linewidth": 0}
        axes.fill_between(hidden["layer"], hidden["ci_low"], hidden["ci_high"], **band)
        layer_ticks(axes, hidden["layer"])
    axes.set(xlabel="layer (0: embedding output)", ylabel="similarity inside an utterance")
    axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
    legend_below(figure, axes, columns=2)
    return figure


@mpl.rc_context(THEME)
def validation_accuracy(epochs: pd.DataFrame, majority: float) -> Figure:
    """Accuracy on the validation corpus after each epoch; a ring marks the state that is kept.

    Args:
        epochs: ``epochs.csv`` of a classifier.
        majority: the share of the most frequent class.
    """
    figure, (axes,) = stacked_axes(height=2.8)
    axes.plot(epochs["epoch"], epochs["accuracy"], marker="o", color=COLOURS[0], label="validation corpus")
    best = epochs.loc[epochs["accuracy"].idxmax()]
    ring = {"marker": "o", "markersize": 12, "markerfacecolor": "none", "linestyle": "", "color": "black"}
    axes.plot(best["epoch"], best["accuracy"], label="kept", **ring)
    axes.axhline(majority, color="black", linestyle="--", linewidth=1.2, label="most frequent class")
    axes.set(xlabel="epoch", ylabel="accuracy")
    layer_ticks(axes, epochs["epoch"] if len(epochs) <= 12 else epochs["epoch"][4::5])
    legend_below(figure, axes)
    return figure


@mpl.rc_context(THEME)
def cosines_by_class(before: pd.DataFrame, after: pd.DataFrame, classes: Sequence[str]) -> Figure:
    """The cosine of utterances to the representative of a class, by their own class (Fosse et al. 2023, Fig. 2).

    A row a representative; on the left before fine-tuning, on the right after it. Heights are shares of a class.

    Args:
        before, after: ``class_directions.cosines_to`` of the same representatives.
        classes: names of the classes.
    """
    represented = sorted(after["representative"].unique())
    figure = PageFigure(figsize=(WIDTH, 2.1 * len(represented) + 0.8), layout="constrained")
    panels = figure.subplots(len(represented), 2, sharex=True, squeeze=False)
    least = min(before["cosine"].min(), after["cosine"].min())
    bins = np.arange(np.floor(least / _BIN), round(1 / _BIN) + 1) * _BIN
    for row, representative in zip(panels, represented, strict=True):
        for axes, table, (stage, _) in zip(row, (before, after), _STAGES.values(), strict=True):
            part = table[table["representative"] == representative]
            for label in sorted(part["class"].unique()):
                look = {"color": COLOURS[label % len(COLOURS)], "linestyle": _LINES[label % len(_LINES)]}
                values = part.loc[part["class"] == label, "cosine"].clip(upper=1)
                shares = {"bins": bins, "stat": "probability", "element": "step", "alpha": 0.2, "linewidth": 1.6}
                sns.histplot(x=values, label=classes[label], ax=axes, **shares, **look)
            axes.set(xlabel="", ylabel="")
            if representative == represented[0]:
                axes.set_title(stage)
        row[0].set_ylabel(f"to {classes[representative]}")
    for axes in panels[-1]:
        axes.set_xlabel("cosine")
    figure.supylabel("share of the class", fontsize=11)
    legend_below(figure, panels[-1, 0], columns=4, title="class of the utterance")
    return figure


@mpl.rc_context(THEME)
def cones(found: Mapping[str, pd.DataFrame]) -> Figure:
    """The values of a head, the outputs of its attention, and the cone of the values (Fosse et al. 2023, Fig. 1).

    A vector is drawn at its own angle to the axis of the values, with its own length. Dashed: the cone.

    Args:
        found: ``class_directions.cone``, by the title of a panel.
    """
    figure = PageFigure(figsize=(WIDTH, 2.5 * len(found) + 0.7), layout="constrained")
    panels = figure.subplots(len(found), 1, squeeze=False)[:, 0]
    for axes, (title, table) in zip(panels, found.items(), strict=True):
        values, outputs = (table[table["of"] == of] for of in ("value", "output"))
        for row in values.itertuples():
            axes.plot([0, row.aside], [0, row.along], color=COLOURS[0], linewidth=0.7, alpha=0.6)
        dots = {"linestyle": "", "marker": "o", "markersize": 4, "color": COLOURS[0]}
        axes.plot(values["aside"], values["along"], label="values $v_j$", **dots)
        marks = {"linestyle": "", "marker": "^", "markersize": 6, "color": COLOURS[1], "markeredgecolor": "black"}
        axes.plot(outputs["aside"], outputs["along"], label="outputs $y_i$", **marks)
        reach, widest = 1.1 * np.hypot(values["along"], values["aside"]).max(), np.radians(values["angle"].max())
        for side in (-1, 1):
            edge = [0, side * reach * np.sin(widest)], [0, reach * np.cos(widest)]
            axes.plot(*edge, color="black", linestyle="--", linewidth=1.2, label="widest value")
        axes.axvline(0, color="0.5", linewidth=0.8, zorder=0)
        axes.set(title=title, aspect="equal")
    panels[-1].set_xlabel("distance from the axis")
    figure.supylabel("along the mean direction of the values", fontsize=11)
    legend_below(figure, panels[0])
    return figure


class TextTable(Table):
    """A numbered table that prints texts of a corpus as they are: what would be markup in them is not."""

    def _cell(self, value: object) -> str:
        if isinstance(value, str):
            return re.sub(r"([!-/:-@\[-`{-~])", r"\\\1", " ".join(value.split()))
        return super()._cell(value)
