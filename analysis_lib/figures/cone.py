"""The values of attention heads, their outputs, and the cones around them (Fosse et al. 2023, Fig. 1)."""

from collections.abc import Mapping

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis_lib.figures.style import WIDTH


def cones(panels: Mapping[str, pd.DataFrame]) -> Figure:
    """The values of a head, the outputs of its attention, and the cone of the values, one panel below another.

    A vector is drawn at its own angle to the axis of the values, with its own length. Dashed: the widest value.

    Args:
        panels: by title, one row per vector: vector (value or output), angle (to the axis, in degrees), along (its
            component along the axis) and aside (its distance from the axis, negative on one side).
    """
    size = (WIDTH, 2.5 * len(panels) + 0.7)
    figure, rows = plt.subplots(len(panels), 1, figsize=size, layout="constrained", squeeze=False)
    for axes, (title, vectors) in zip(rows[:, 0], panels.items(), strict=True):
        _cone(axes, vectors)
        axes.set(title=title, xlabel="", ylabel="", aspect="equal")
    axes.set_xlabel("distance from the axis")
    figure.supylabel("along the mean direction of the values", fontsize=11)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def _cone(axes: Axes, vectors: pd.DataFrame) -> None:
    value_colour, output_colour = sns.color_palette("colorblind")[:2]
    values, outputs = (vectors[vectors["vector"] == kind] for kind in ("value", "output"))
    rays = (np.outer([0, 1], values[component]) for component in ("aside", "along"))
    axes.plot(*rays, color=value_colour, linewidth=0.7, alpha=0.6)
    dots = {"x": "aside", "y": "along", "linewidth": 0.5, "edgecolor": "black", "ax": axes, "zorder": 3}
    sns.scatterplot(values, **dots, color=value_colour, marker="o", s=18, label="values $v_j$", legend=False)
    sns.scatterplot(outputs, **dots, color=output_colour, marker="^", s=36, label="outputs $y_i$", legend=False)
    reach, widest = 1.1 * np.hypot(values["along"], values["aside"]).max(), np.radians(values["angle"].max())
    edge = reach * np.array([-np.sin(widest), 0, np.sin(widest)]), reach * np.array([np.cos(widest), 0, np.cos(widest)])
    axes.plot(*edge, color="black", linestyle="--", linewidth=1.2, label="widest value")
    axes.axvline(0, color="0.5", linewidth=0.8, zorder=0)
