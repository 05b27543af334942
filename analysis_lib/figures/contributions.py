"""What each dimension adds to the attention scores, with the largest contributions marked head by head."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis_lib.errors import AnalysisError
from analysis_lib.figures.style import WIDTH

MARKERS = "os^DvP"


def contribution_peaks(
    contributions: pd.DataFrame, layers: Sequence[int], outliers: pd.DataFrame, named: int = 3, height: float = 2.5
) -> Figure:
    """Mean C_j of every dimension, one panel per layer (Maruta and Matsuzaki 2024, Fig. 4 and 5).

    All dimensions of all heads are thin lines. At the dimensions with the largest |C_j| the heads stand side by
    side, one marker each, so that they can be told apart.

    Args:
        contributions: the ``score_contributions`` table.
        layers: attention layers to show.
        outliers: the ``outlier_dimensions`` table; an asterisk marks outliers of the layer's input.
        named: how many dimensions of a panel are named.
        height: of a panel, in inches.

    Raises:
        AnalysisError: the model has no such layer.
    """
    depth = contributions["layer"].max()
    if not all(1 <= layer <= depth for layer in layers):
        raise AnalysisError(
            f"layers {list(layers)} were given, and the model has attention layers 1 to {depth}: choose among these"
        )
    figure, panels = plt.subplots(
        len(layers), figsize=(WIDTH, height * len(layers)), sharex=True, squeeze=False, layout="constrained"
    )
    overall = contributions[contributions["key_type"] == "all"]
    for axes, layer in zip(panels.flat, layers, strict=True):
        heads = overall[overall["layer"] == layer].pivot(index="dimension", columns="head", values="contribution")
        axes.plot(heads.index, heads, color="0.45", linewidth=0.5, alpha=0.6, zorder=1)
        _mark_peaks(axes, heads, set(outliers.loc[outliers["layer"] == layer - 1, "dimension"]), named)
        axes.set(title=f"layer {layer}")
        axes.margins(x=0.03, y=0.15)
    panels[-1, 0].set_xlabel("dimension")
    figure.supylabel("mean contribution $C_j$ to the score", fontsize="medium")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, title="head", loc="outside lower center", ncols=6, columnspacing=1)
    return figure


def _mark_peaks(axes: Axes, heads: pd.DataFrame, outliers: set[int], named: int) -> None:
    """Draw each head at the dimensions with the largest values, and write their numbers."""
    extreme = sorted(heads.abs().max(axis=1).nlargest(named).index)
    width, count = len(heads), heads.shape[1]
    colours = sns.color_palette("cividis", count)
    for i, head in enumerate(heads.columns):
        # Side by side around the dimension, over 3 % of the axis.
        positions = [dimension + 0.03 * width * ((i + 0.5) / count - 0.5) for dimension in extreme]
        marker = MARKERS[i % len(MARKERS)]
        axes.scatter(positions, heads.loc[extreme, head], s=11, color=colours[i], marker=marker, label=f"{head}")
    for i, dimension in enumerate(extreme):
        row = heads.loc[dimension]
        value = row[row.abs().idxmax()]
        # Next to the right border or to another peak, the name goes to the left of its own.
        crowded = i + 1 < len(extreme) and extreme[i + 1] - dimension < 0.15 * width
        left = crowded or dimension > 0.92 * width
        axes.annotate(
            f"{dimension}{'*' if dimension in outliers else ''}",
            (dimension, value),
            xytext=(-8 if left else 8, (-2 if value > 0 else -4) - (10 if crowded else 0)),
            textcoords="offset points",
            ha="right" if left else "left",
            fontweight="bold",
            fontsize="small",
        )
