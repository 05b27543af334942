"""Figures of the part on anisotropy."""

from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from analysis_lib.errors import AnalysisError
from analysis_lib.figures.base import (
    COLOURS,
    THEME,
    WIDTH,
    PageFigure,
    layer_ticks,
    model_legend,
    model_styles,
    stacked_axes,
)
from analysis_lib.metrics.anisotropy import isotropic_cosine_density, isotropic_cosine_quantile
from analysis_lib.papers.godey.drift import SIGNIFICANCE, drift_correlation

_SPACES = {
    "query": ("queries", COLOURS[0], "o"),
    "key": ("keys", COLOURS[1], "s"),
    "value": ("values", COLOURS[2], "^"),
}


@mpl.rc_context(THEME)
def anisotropy_by_layer(table: pd.DataFrame, width: int | None = None) -> Figure:
    """Average cosine of the hidden states against the layer, with its 95 % interval as a band.

    Args:
        table: the ``anisotropy`` table.
        width: dimensions of the hidden state; draws the 95th percentile of the cosine in an isotropic space.
    """
    hidden = table[table["space"] == "hidden"]
    figure, (axes,) = stacked_axes()
    axes.plot(hidden["layer"], hidden["cosine"], marker="o", color=COLOURS[0], label="average cosine")
    axes.fill_between(
        hidden["layer"],
        hidden["ci_low"],
        hidden["ci_high"],
        color=COLOURS[0],
        alpha=0.3,
        label="95 % interval",
    )
    if width is not None:
        label = f"isotropic, 95th percentile (d = {width})"
        axes.axhline(isotropic_cosine_quantile(width), color="black", linestyle="--", linewidth=1.2, label=label)
    axes.set(
        xlabel="layer (0: embedding output)",
        ylabel="average cosine",
        ylim=(min(0, hidden["ci_low"].min()), None),
    )
    layer_ticks(axes, hidden["layer"])
    axes.legend(loc="best")
    return figure


@mpl.rc_context(THEME)
def anisotropy_by_head(table: pd.DataFrame, width: int | None = None) -> Figure:
    """Average cosine of queries, keys and values: one point per head, one panel per space.

    Args:
        table: the ``anisotropy`` table.
        width: dimensions of a head; draws the 95th percentile of the cosine in an isotropic space.
    """
    figure, panels = stacked_axes(rows=len(_SPACES), height=2.1, share_y=True)
    for axes, (space, (label, colour, marker)) in zip(panels, _SPACES.items(), strict=True):
        part = table[table["space"] == space]
        axes.errorbar(
            part["layer"] + 0.5 * (part["head"].astype(float) / part["head"].max() - 0.5),
            part["cosine"],
            yerr=[part["cosine"] - part["ci_low"], part["ci_high"] - part["cosine"]],
            fmt=marker,
            markersize=3.5,
            linewidth=1,
            color=colour,
        )
        if width is not None:
            axes.axhline(isotropic_cosine_quantile(width), color="black", linestyle="--", linewidth=1.2)
        axes.set(title=label, ylabel="average cosine")
        layer_ticks(axes, part["layer"])
    panels[-1].set_xlabel("attention layer (heads side by side)")
    return figure


_DEPTH = "depth (0: embedding output, 1: last layer)"


def _model_lines(axes: Axes, table: pd.DataFrame, x: str, y: str, styles: dict, bands: bool = True) -> None:
    """A line a model, which breaks between stacks, with the intervals of ``y``; an untrained twin is lighter."""
    stacks = table["stack"] if "stack" in table else pd.Series("", table.index)
    last = table.groupby("model")["layer"].transform("max")
    table = table.assign(stack=stacks.fillna(""), x=table["layer"] / (last if x == "depth" else 1))
    for (model, trained, _), part in table.groupby(["model", "trained", "stack"], sort=False):
        colour, marker = styles[model]
        axes.plot(
            part["x"],
            part[y],
            color=colour,
            marker=marker,
            markersize=4.5,
            linestyle="-" if trained else "--",
            markerfacecolor=colour if trained else "white",
            alpha=1 if trained else 0.55,
            label=model if trained else f"{model}, untrained",
        )
        if bands:
            band = {"color": colour, "alpha": 0.25 if trained else 0.12, "linewidth": 0}
            axes.fill_between(part["x"], part["ci_low"], part["ci_high"], **band)


@mpl.rc_context(THEME)
def anisotropy_by_model(table: pd.DataFrame, x: str = "layer") -> Figure:
    """Average cosine against the layer, a line a model, with 95 % intervals as bands (Godey et al. 2024, Fig. 1 to 4).

    An untrained twin has the colour and marker of its model, lighter and dashed. Where a model has several stacks,
    such as encoder and decoder, its line breaks between them.

    Args:
        table: columns model, layer, cosine, ci_low, ci_high, trained (a twin has the name of its model, and False
            here) and, where models have stacks, stack. Without rows, the figure says that no model was given.
        x: ``layer``, or ``depth``: the layer as a share of the model's last.

    Raises:
        AnalysisError: another x.
    """
    if x not in ("layer", "depth"):
        raise AnalysisError(f"x is {x!r}: give layer or depth")
    figure, (axes,) = stacked_axes(height=4.0)
    if table.empty:
        axes.text(0.5, 0.5, "no model of this kind was given", ha="center", transform=axes.transAxes)
        axes.set_axis_off()
        return figure
    styles = model_styles(table["model"])
    _model_lines(axes, table, x, "cosine", styles)
    axes.set(
        xlabel="layer (0: embedding output)" if x == "layer" else _DEPTH,
        ylabel="average cosine",
        ylim=(min(0, table["cosine"].min(), table["ci_low"].min()), None),
    )
    if x == "layer":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    model_legend(figure, styles, untrained=not table["trained"].all())
    return figure


@mpl.rc_context(THEME)
def isotropic_density(dimensions: Sequence[int] = (4, 16, 64, 256, 1024)) -> Figure:
    """The density of the cosine of two random directions, a curve a dimension (Godey et al. 2024, Fig. 17).

    A marker on each curve is its 95th percentile.

    Args:
        dimensions: of the isotropic space, at least 2 each.
    """
    figure, (axes,) = stacked_axes()
    # Twice as fine where the narrowest curve is high.
    cosine = np.sort(np.concatenate([np.linspace(-1, 1, 801), np.linspace(-0.2, 0.2, 801)]))
    styles = model_styles(f"d = {d}" for d in dimensions)
    for d, (label, (colour, marker)) in zip(dimensions, styles.items(), strict=True):
        # In the plane the density has poles at the borders.
        density = isotropic_cosine_density(cosine, d)
        axes.plot(cosine, np.where(np.isfinite(density), density, np.nan), color=colour, label=label)
        percentile = np.array([isotropic_cosine_quantile(d)])
        axes.plot(percentile, isotropic_cosine_density(percentile, d), color=colour, marker=marker, markersize=6)
    axes.set(xlabel="cosine of two random directions", ylabel="density", xlim=(-1, 1), ylim=(0, None))
    model_legend(figure, styles, untrained=False)
    return figure


def _model_points(
    axes: Axes, x: pd.Series, y: pd.Series, style: tuple[tuple[float, float, float], str], model: str, trained: bool
) -> None:
    """Points of a model, hollow where it is untrained."""
    colour, marker = style
    axes.plot(
        x,
        y,
        linestyle="",
        marker=marker,
        markersize=5,
        color=colour,
        markerfacecolor=colour if trained else "white",
        label=model if trained else f"{model}, untrained",
    )


@mpl.rc_context(THEME)
def cosine_against_dimension(points: pd.DataFrame) -> Figure:
    """The isotropic 95th percentile against the dimension, and the layers of models (Godey et al. 2024, Fig. 18).

    A point is the average cosine of a layer, hollow where the model is untrained; models of the same width stand
    side by side. In the grey below the line lie 95 % of the cosines of random directions.

    Args:
        points: columns model, layer, dimensions, cosine, trained.
    """
    figure, (axes,) = stacked_axes(height=4.0)
    low, high = points["dimensions"].min(), points["dimensions"].max()
    curve = np.unique(np.geomspace(max(2, low / 4), 4 * high, 200).astype(int))
    isotropic = [isotropic_cosine_quantile(int(d)) for d in curve]
    percentile = axes.plot(curve, isotropic, color="black", linestyle="--", label="isotropic, 95th percentile")
    axes.fill_between(curve, -1, isotropic, color="0.9", linewidth=0)
    styles = model_styles(points["model"])
    for (model, trained), part in points.groupby(["model", "trained"], sort=False):
        # Side by side over a third of the dimension, which a logarithmic axis shows alike everywhere.
        order = list(styles).index(model) + (0.5 if not trained else 0)
        aside = 1 + 0.35 * ((order + 0.5) / len(styles) - 0.5)
        _model_points(axes, part["dimensions"] * aside, part["cosine"], styles[model], model, trained)
    axes.set(
        xscale="log",
        xlabel="dimensions",
        ylabel="average cosine of a layer",
        xlim=(curve[0], curve[-1]),
        ylim=(min(-0.02, points["cosine"].min() - 0.02), max(isotropic[0], points["cosine"].max()) + 0.05),
    )
    model_legend(figure, styles, untrained=not points["trained"].all(), linestyle="", first=percentile)
    return figure


# Of the isotropy table: what an isotropic cloud has, and how the axis says it.
_ISOTROPY = {
    "deviations": (0, "standard deviations\nof an isotropic cosine"),
    "effective_share": (1, "effective dimension\nas a share of d"),
    "isoscore": (1, "IsoScore"),
}


@mpl.rc_context(THEME)
def isotropy_by_model(table: pd.DataFrame) -> Figure:
    """Three measures of isotropy against the depth: a panel a measure, a line a model, dashed what isotropy has.

    The panels of the effective dimension and of IsoScore are logarithmic, and 1 is isotropic in both.

    Args:
        table: columns model, trained, layer and those of the ``isotropy`` table.
    """
    finite = table["effective_dimension"].where(np.isfinite(table["effective_dimension"]))
    table = table.assign(effective_share=finite / table["dimensions"])
    figure, panels = stacked_axes(rows=len(_ISOTROPY), height=2.8)
    styles = model_styles(table["model"])
    for axes, (measure, (isotropic, label)) in zip(panels, _ISOTROPY.items(), strict=True):
        line = axes.axhline(isotropic, color="black", linestyle="--", linewidth=1.2, label="isotropic")
        _model_lines(axes, table, "depth", measure, styles, bands=measure == "deviations")
        axes.set(ylabel=label, yscale="log" if isotropic else "linear")
    panels[-1].set_xlabel(_DEPTH)
    model_legend(figure, styles, untrained=not table["trained"].all(), first=[line])
    return figure


@mpl.rc_context(THEME)
def dimensions_in_use(points: pd.DataFrame) -> Figure:
    """In how many dimensions the vectors of a layer lie, seen from the origin and seen from their mean.

    A point is a layer, hollow where the model is untrained. On the dashed line the two are the same. Above it, the
    mean hides dimensions that the cloud uses around it; below it, a few long vectors outweigh the others.

    Args:
        points: ``metrics.isotropy.against_isoscore``, with columns model and trained.
    """
    figure, (axes,) = stacked_axes(height=4.4)
    styles = model_styles(points["model"])
    for (model, trained), part in points.groupby(["model", "trained"], sort=False):
        _model_points(axes, part["effective_dimension"], part["participation"], styles[model], model, trained)
    axes.axline((1, 1), (2, 2), color="black", linestyle="--", linewidth=1.2, zorder=1)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="dimensions seen from the origin (effective dimension)",
        ylabel="dimensions seen from the mean\n(participation ratio of the covariance)",
    )
    same = Line2D([], [], color="black", linestyle="--", linewidth=1.2, label="as many")
    model_legend(figure, styles, untrained=not points["trained"].all(), linestyle="", first=[same])
    return figure


# A p-value below this is drawn here: where the correlation is perfect it is 0, which has no logarithm.
_LEAST_P = 1e-12


@mpl.rc_context(THEME)
def drift_pvalues(correlations: pd.DataFrame, test: str = "spearman") -> Figure:
    """The p-value of the correlation of drift and cosine over the layers of each model (Godey et al. 2024, Fig. 5, 16).

    Left of the red line it is below 0.05. A hollow marker has too few layers to get there whatever they are; a model
    without a p-value says so. Behind each name stands the number of layers.

    Args:
        correlations: ``metrics.drift.drift_correlation``.
        test: ``spearman``, as in Figure 5, or ``pearson``, as in Figure 16.

    Raises:
        AnalysisError: another test.
    """
    if test not in ("spearman", "pearson"):
        raise AnalysisError(f"the test is {test!r}: give spearman or pearson")
    figure, (axes,) = stacked_axes(height=1.2 + 0.32 * len(correlations))
    axes.axvline(SIGNIFICANCE, color="red", linestyle="--", linewidth=1.2)
    for row, (_, model) in enumerate(correlations.iterrows()):
        p = model[f"{test}_p"]
        if np.isnan(p):
            axes.annotate(
                model["note"],
                (SIGNIFICANCE, row),
                xytext=(-6, 0),
                textcoords="offset points",
                ha="right",
                va="center",
                fontsize=9,
            )
            continue
        axes.plot(
            max(p, _LEAST_P),
            row,
            marker="o" if p > _LEAST_P else "<",
            markersize=7,
            color=COLOURS[0],
            markerfacecolor=COLOURS[0] if model["enough"] else "white",
        )
    names = [f"{name} ({layers})" for name, layers in correlations[["model", "layers"]].itertuples(index=False)]
    axes.set_yticks(range(len(names)), names)
    least = correlations[f"{test}_p"].clip(lower=_LEAST_P).min()
    axes.set(
        xscale="log",
        xlim=(min(0.003, least / 2) if np.isfinite(least) else 0.003, 1.3),
        ylim=(len(names) - 0.5, -0.5),
        xlabel=f"p-value ({test.capitalize()}); red: {SIGNIFICANCE}",
    )
    axes.grid(visible=False, axis="y")
    return figure


@mpl.rc_context(THEME)
def drift_scatter(table: pd.DataFrame) -> Figure:
    """The norm of the mean vector against the average cosine: a panel a model, a point a layer.

    Points go from dark (first layer) to light (last), both named; the title gives Spearman's ρ.

    Args:
        table: columns model, layer, norm_of_mean, cosine; one row a layer.
    """
    correlations = drift_correlation(table).set_index("model")
    rows = -(-len(correlations) // 2)
    figure = PageFigure(figsize=(WIDTH, 2.3 * rows), layout="constrained")
    panels = list(np.ravel(figure.subplots(rows, 2, squeeze=False)))
    for axes, (model, part) in zip(panels, table.groupby("model", sort=False), strict=False):
        part = part.sort_values("layer")
        axes.plot(part["norm_of_mean"], part["cosine"], color="0.75", linewidth=0.8, zorder=1)
        axes.scatter(part["norm_of_mean"], part["cosine"], c=part["layer"], cmap="cividis", s=22, zorder=2)
        for _, end in part.iloc[[0, -1]].iterrows():
            axes.annotate(
                f"{end['layer']}",
                (end["norm_of_mean"], end["cosine"]),
                xytext=(4, 4),
                textcoords="offset points",
                fontsize=9,
                fontweight="bold",
            )
        rho = correlations.loc[model, "spearman"]
        axes.set_title(model if np.isnan(rho) else f"{model}: ρ = {rho:z.2f}", fontsize=10)
        axes.margins(0.15)
    for axes in panels[len(correlations) :]:
        axes.remove()
    figure.supxlabel("norm of the mean hidden state", fontsize=11)
    figure.supylabel("average cosine", fontsize=11)
    return figure
