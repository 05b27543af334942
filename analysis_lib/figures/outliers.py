"""Figures of the part on outlier dimensions, and its table of published numbers."""

from collections.abc import Sequence

import matplotlib as mpl
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis_lib.errors import AnalysisError
from analysis_lib.figures.base import COLOURS, THEME, layer_ticks, stacked_axes
from analysis_lib.figures.tables import Table
from analysis_lib.metrics.attention_by_token_type import by_layer

# A marker beside every colour, so that no curve is told by its colour alone.
_TYPES = {
    "all": ("all tokens", "black", "x"),
    "cls": ("[CLS]", COLOURS[0], "o"),
    "sep": ("[SEP]", COLOURS[1], "s"),
    "punct": ("comma or full stop", COLOURS[2], "^"),
    "other": ("other", COLOURS[7], "D"),
}


def published_beside_ours(comparison: pd.DataFrame, name: str, caption: str) -> Table:
    """``papers.compare_table1`` as a table: ours, and the published number in brackets, one column per head."""
    cells = comparison.assign(
        cell=[f"{ours:.1f} ({paper:.1f})" for ours, paper in comparison[["ours", "published"]].itertuples(index=False)]
    )
    keys = ["layer", "dimension", "key_type"]
    wide = cells.pivot(index=keys, columns="head", values="cell").rename(columns=str)
    return Table(wide.loc[cells[keys].drop_duplicates().itertuples(index=False)].reset_index(), name, caption)


@mpl.rc_context(THEME)
def dimension_means(table: pd.DataFrame, outliers: pd.DataFrame, shown: int = 3) -> Figure:
    """Mean of each dimension of the hidden state over all tokens, one line per layer (Maruta & Matsuzaki 2024, Fig. 1).

    Args:
        table: the ``dimension_means`` table.
        outliers: ``metrics.outlier_dimensions.persistence``; the first ``shown`` are named in the figure.
    """
    means = table[table["token_type"] == "all"].pivot(index="dimension", columns="layer", values="mean")
    figure, (axes,) = stacked_axes(height=3.8)
    colours = sns.color_palette("cividis", means.shape[1])
    styles = ["-", "--", ":"]
    for i, layer in enumerate(means.columns):
        axes.plot(
            means.index,
            means[layer],
            color=colours[i],
            linestyle=styles[i % 3],
            linewidth=0.9,
            label=f"{layer}",
        )
    for dimension in outliers["dimension"].head(shown):
        value = means.loc[dimension, means.loc[dimension].abs().idxmax()]
        axes.annotate(
            str(dimension),
            (dimension, value),
            xytext=(6, 2 if value > 0 else -8),
            textcoords="offset points",
            fontweight="bold",
        )
    axes.margins(x=0.01, y=0.1)
    axes.set(xlabel="dimension", ylabel="mean over all tokens")
    axes.legend(title="layer", ncols=7, loc="upper center", bbox_to_anchor=(0.5, -0.18), columnspacing=1)
    return figure


@mpl.rc_context(THEME)
def outlier_values(table: pd.DataFrame, dimensions: Sequence[int]) -> Figure:
    """Mean value of each outlier dimension by token type, against the layer (Maruta and Matsuzaki 2024, Fig. 3)."""
    figure, panels = stacked_axes(rows=max(1, len(dimensions)), height=2.4)
    for axes, dimension in zip(panels, dimensions, strict=False):
        part = table[(table["dimension"] == dimension) & (table["token_type"] != "all")]
        _lines_by_type(axes, part, "token_type", "mean")
        axes.set(title=f"dimension {dimension}", ylabel="mean")
    if not len(dimensions):
        panels[0].text(0.5, 0.5, "no dimension is an outlier in any layer", ha="center", transform=panels[0].transAxes)
        return figure
    panels[-1].set_xlabel("layer (0: embedding output)")
    _type_legend(figure, panels[0])
    return figure


@mpl.rc_context(THEME)
def attention_by_token_type(table: pd.DataFrame, column: str = "weight") -> Figure:
    """Attention per type of key against the layer, mean over heads (Maruta and Matsuzaki 2024, Fig. 2).

    Args:
        table: the ``attention_by_token_type`` table.
        column: ``weight``, the mean weight per key, as the paper shows it, or ``mass``, the total per query.
    """
    figure, (axes,) = stacked_axes()
    layers = by_layer(table)
    _lines_by_type(axes, layers, "key_type", column)
    axes.set(
        xlabel="attention layer",
        ylabel={"weight": "mean weight per key", "mass": "share of attention"}[column],
        ylim=(0, None if column == "weight" else 1),
    )
    if column == "mass":
        axes.axhline(0.5, color="black", linestyle="--", linewidth=1)
    _type_legend(figure, axes)
    return figure


def _lines_by_type(axes: Axes, table: pd.DataFrame, types: str, column: str) -> None:
    for kind, (label, colour, marker) in _TYPES.items():
        part = table[table[types] == kind]
        if len(part):
            axes.plot(part["layer"], part[column], marker=marker, markersize=5, color=colour, label=label)
    layer_ticks(axes, table["layer"])


def _type_legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, columnspacing=1.2, handletextpad=0.4)


@mpl.rc_context(THEME)
def contributions(
    table: pd.DataFrame, layers: Sequence[int], outliers: pd.DataFrame, named: int = 3, height: float = 2.5
) -> Figure:
    """Mean C_j of every dimension, one panel per layer (Maruta and Matsuzaki 2024, Fig. 4 and 5).

    All dimensions of all heads are drawn as thin lines; at the dimensions with the largest |C_j| the heads stand
    side by side, one marker each, so that they can be told apart.

    Args:
        table: the ``score_contributions`` table.
        layers: attention layers to show.
        outliers: the ``outlier_dimensions`` table; an asterisk marks outliers of the layer's input.
        named: how many dimensions of a panel are named.
        height: of a panel, in inches.

    Raises:
        AnalysisError: the model has no such layer.
    """
    depth = table["layer"].max()
    if not all(1 <= layer <= depth for layer in layers):
        raise AnalysisError(f"layers {list(layers)} were asked for, and the model has attention layers 1 to {depth}")
    figure, panels = stacked_axes(len(layers), height=height)
    overall = table[table["key_type"] == "all"]
    for axes, layer in zip(panels, layers, strict=True):
        heads = overall[overall["layer"] == layer].pivot(index="dimension", columns="head", values="contribution")
        axes.plot(heads.index, heads, color="0.45", linewidth=0.5, alpha=0.6, zorder=1)
        known = set(outliers.loc[outliers["layer"] == layer - 1, "dimension"])
        _mark_peaks(axes, heads, known, named)
        axes.set(title=f"layer {layer}")
        axes.margins(x=0.03, y=0.15)
    panels[-1].set_xlabel("dimension")
    figure.supylabel("mean contribution $C_j$ to the score", fontsize=11)
    handles, labels = panels[0].get_legend_handles_labels()
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
        marker = "os^DvP"[i % 6]
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
            fontsize=9,
        )
