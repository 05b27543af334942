"""The queries and keys of heads along training: their clouds, the paths of their means, and the axis of its steps."""

from collections.abc import Iterable, Sequence

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from analysis_lib.errors import AnalysisError
from analysis_lib.figures.style import WIDTH

MARKERS = {"query": "o", "key": "s"}


def query_key_clouds(clouds: pd.DataFrame, steps: Sequence[int]) -> Figure:
    """Queries and keys at some steps: one row per step, one column per head (Godey et al. 2024, Fig. 11, 19, 20).

    Large markers are the means; the two thin lines cross at the origin. The axes of a head are the same at every step
    of ``clouds``, shown or not.

    Args:
        clouds: columns head, step, space (query or key), x and y; one row per vector.
        steps: which to show.

    Raises:
        AnalysisError: a step that is not in the table.
    """
    known = sorted(clouds["step"].unique().tolist())
    if missing := [step for step in steps if step not in known]:
        raise AnalysisError(f"there is no step {missing[0]}: give some of {', '.join(map(str, known))}")
    heads = clouds["head"].unique()
    size = (WIDTH, 1.9 * len(steps) + 0.9)
    figure, panels = plt.subplots(
        len(steps), len(heads), sharex="col", sharey="col", squeeze=False, figsize=size, layout="constrained"
    )
    for column, head in zip(panels.T, heads, strict=True):
        cloud = clouds[clouds["head"] == head]
        for axes, step in zip(column, steps, strict=True):
            points = cloud[cloud["step"] == step]
            look = {"x": "x", "y": "y", "hue": "space", "style": "space", "markers": MARKERS, "ax": axes}
            look |= {"hue_order": list(MARKERS)}
            sns.scatterplot(points, **look, s=9, alpha=0.3, linewidth=0, legend=False)
            sns.scatterplot(points.groupby("space")[["x", "y"]].mean(), **look, s=45, edgecolor="black")
            _cross(axes)
            axes.set(xlabel="first direction", ylabel="")
            corner = {"transform": axes.transAxes, "va": "top", "fontsize": 10, "fontweight": "bold"}
            axes.text(0.03, 0.97, f"step {step_label(step)}", **corner)
        column[0].set_title(head, fontsize=10)
        column[0].update_datalim([(0, 0), *cloud[["x", "y"]].to_numpy()])
        column[0].autoscale_view()
    figure.supylabel("second direction", fontsize=11)
    _one_legend(figure)
    return figure


def mean_paths(paths: pd.DataFrame) -> Figure:
    """The path of the mean query and of the mean key, one arrow per checkpoint (Godey et al. 2024, Fig. 12, 21, 22).

    A hollow marker is the start, a filled one the end.

    Args:
        paths: columns head, step, space (query or key), x and y, in the order of the steps.
    """
    heads = paths["head"].unique()
    size = (WIDTH, 3.0 * len(heads) + 0.5)
    figure, panels = plt.subplots(len(heads), 1, squeeze=False, figsize=size, layout="constrained")
    for axes, head in zip(panels.flat, heads, strict=True):
        path = paths[paths["head"] == head]
        for (space, marker), colour in zip(MARKERS.items(), sns.color_palette(), strict=False):
            points = path.loc[path["space"] == space, ["x", "y"]]
            moves = points.diff().iloc[1:]
            arrows = {"angles": "xy", "scale_units": "xy", "scale": 1, "width": 0.006, "headwidth": 4}
            axes.quiver(*points.iloc[:-1].to_numpy().T, moves["x"], moves["y"], color=colour, zorder=2, **arrows)
            look = {"marker": marker, "markersize": 7, "color": colour, "linestyle": "", "zorder": 3}
            axes.plot(*points.iloc[0], markerfacecolor="white", **look)
            axes.plot(*points.iloc[-1], markeredgecolor="black", label=space, **look)
        _cross(axes)
        axes.set_title(head, fontsize=10)
        axes.margins(0.12)
        axes.update_datalim(path[["x", "y"]].to_numpy())
        axes.autoscale_view()
        axes.legend()
    panels[-1, 0].set_xlabel("first direction")
    figure.supylabel("second direction", fontsize=11)
    _one_legend(figure)
    return figure


def _cross(axes: Axes) -> None:
    axes.axhline(0, color="0.3", linewidth=0.8, zorder=1)
    axes.axvline(0, color="0.3", linewidth=0.8, zorder=1)


def _one_legend(figure: Figure) -> None:
    """The legend that all panels have in common, below the figure."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    for axes in figure.axes:
        axes.get_legend().remove()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))


def step_axis(axes: Axes, steps: Iterable[int]) -> None:
    """Give the steps one scale: linear up to the first checkpoint after the start, logarithmic from there.

    Args:
        axes: whose horizontal axis it is.
        steps: of the checkpoints.
    """
    steps = list(steps)
    first, last = min((step for step in steps if step), default=1), max(*steps, 1)
    axes.set_xscale("symlog", linthresh=first, linscale=0.5)
    # More numbers, or one close to the first checkpoint, would touch in a narrow panel.
    between = (round(last / part) for part in (10, 100, 1000) if last / part > 2 * first)
    ticks = sorted({0, first, last, *between})
    axes.set_xticks(ticks, [step_label(tick) for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(-0.15 * first, last * 1.15)


def step_label(step: int) -> str:
    """A step as short as an axis needs it.

    >>> step_label(800), step_label(20_000), step_label(2_000_000)
    ('800', '20k', '2M')
    """
    return f"{step / 1e6:g}M" if step >= 1e6 else f"{step / 1e3:g}k" if step >= 1e4 else f"{step:g}"
