"""Figures on what Fosse et al. (2023, sec. 5) leave open: more classes, less width, and which tokens decide."""

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis_lib.figures.base import COLOURS, THEME, legend_below, model_styles, stacked_axes
from analysis_lib.papers.fosse.counts import ENOUGH, simplex_cosine

_LINES = ("-", "--", ":", "-.")


@mpl.rc_context(THEME)
def directions_by_count(found: pd.DataFrame) -> Figure:
    """How well directions tell classes apart, and how far apart they are, against the number of classes.

    Lines are means over seeds, bars reach from the lowest end of the seeds' intervals to the highest.

    Args:
        found: ``class_counts.directions_by_count``.
    """
    figure, (areas, cosines) = stacked_axes(2, height=2.6)
    counts = np.sort(found["classes"].unique())
    for axes, name, colour, marker, label in (
        (areas, "auc", COLOURS[0], "o", "mean over classes"),
        (cosines, "cosine", COLOURS[1], "s", "mean over pairs"),
    ):
        of = found.groupby("classes")
        mean, low, high = of[name].mean(), of[f"{name}_low"].min(), of[f"{name}_high"].max()
        bars = {"yerr": [mean - low, high - mean], "capsize": 3, "markersize": 5}
        axes.errorbar(mean.index, mean, color=colour, marker=marker, label=label, **bars)
    areas.axhline(0.5, color="black", linestyle="--", linewidth=1, label="chance")
    pairs = found.groupby("classes").agg({"cosine_least": "min", "cosine_most": "max"})
    band = {"color": COLOURS[1], "alpha": 0.2, "linewidth": 0}
    cosines.fill_between(pairs.index, pairs["cosine_least"], pairs["cosine_most"], label="all pairs", **band)
    least = [simplex_cosine(count) for count in counts]
    cosines.plot(counts, least, color="black", linestyle=":", label="least possible: −1/(K−1)")
    cosines.set_xscale("log", base=2)
    cosines.set_xticks(counts, [str(count) for count in counts])
    areas.tick_params(labelbottom=True)
    areas.set(ylabel="area under the curve", ylim=(0.4, 1.03))
    cosines.set(xlabel="classes K", ylabel="cosine of class means", ylim=(-1.05, 1.05))
    areas.legend(loc="lower left")
    legend_below(figure, cosines)
    return figure


@mpl.rc_context(THEME)
def accuracy_by_width(found: pd.DataFrame) -> Figure:
    """Accuracy as a share of that of the largest width, mean over seeds, a line a number of classes.

    Args:
        found: ``class_counts.accuracy_by_width``.
    """
    figure, (axes,) = stacked_axes(height=3.4)
    wide = found.pivot_table(index="classes", columns="width", values="accuracy")
    for i, (count, (colour, marker)) in enumerate(model_styles(wide.index).items()):
        look = {"color": colour, "marker": marker, "markersize": 5, "linestyle": _LINES[i % len(_LINES)]}
        axes.plot(wide.columns, wide.loc[count] / wide.loc[count].iloc[-1], label=f"{count} classes", **look)
    axes.axhline(ENOUGH, color="black", linestyle="--", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks(wide.columns, [str(width) for width in wide.columns])
    axes.set(xlabel="width d", ylabel="share of the widest's accuracy", ylim=(0, 1.08))
    legend_below(figure, axes, columns=4)
    return figure


@mpl.rc_context(THEME)
def circle(found: pd.DataFrame) -> Figure:
    """Texts on the circle of width 3, by class.

    Args:
        found: ``class_counts.circle``.
    """
    figure, (axes,) = stacked_axes(height=4.6)
    random, angles = np.random.default_rng(0), np.linspace(0, 2 * np.pi, 200)
    radius = np.sqrt(3)
    axes.plot(radius * np.cos(angles), radius * np.sin(angles), color="0.7", linewidth=1, zorder=0)
    for name, (colour, marker) in model_styles(sorted(found["class"])).items():
        part = found[found["class"] == name]
        # Texts of a class lie on top of each other: a little farther out or in they can be seen.
        away = 1 + 0.12 * random.uniform(-1, 1, len(part))
        look = {"color": colour, "marker": marker, "markersize": 4}
        axes.plot(part["x"] * away, part["y"] * away, linestyle="", alpha=0.6, label=name, **look)
    axes.set(aspect="equal", xlim=(-2.1, 2.1), ylim=(-2.1, 2.1))
    axes.set(xlabel="first direction", ylabel="second direction")
    legend_below(figure, axes, columns=2)
    return figure


@mpl.rc_context(THEME)
def shares_of_the_largest(found: pd.DataFrame) -> Figure:
    """What the few largest tokens of a text carry, of its contributions and of its attention.

    Bars are means over seeds, lines reach from the lowest end of the seeds' intervals to the highest.

    Args:
        found: ``token_contributions.concentration`` of each seed, one below the other.
    """
    figure, (axes,) = stacked_axes(height=3.2)
    of = found.groupby("tokens")
    places = np.arange(of.ngroups)
    looks = {
        "contribution": ("of all |contributions|", COLOURS[0], ""),
        "weight": ("of the attention weights", COLOURS[1], "//"),
    }
    for side, (name, (label, colour, hatch)) in zip((-0.2, 0.2), looks.items(), strict=True):
        mean, low, high = of[name].mean(), of[f"{name}_low"].min(), of[f"{name}_high"].max()
        bars = {"yerr": [mean - low, high - mean], "capsize": 3, "edgecolor": "white"}
        axes.bar(places + side, mean, 0.38, color=colour, hatch=hatch, label=label, **bars)
    for i, (place, even) in enumerate(zip(places, of["even"].mean(), strict=True)):
        label = "equal shares" if i == 0 else None
        axes.plot([place - 0.42, place + 0.42], [even, even], color="black", linestyle="--", label=label)
    axes.set_xticks(places, [str(rank) for rank in of.groups])
    axes.set(xlabel="largest tokens of a text", ylabel="share", ylim=(0, 1))
    legend_below(figure, axes)
    return figure
