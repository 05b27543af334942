"""What the figures that have not moved to their pages share."""

import io
from collections.abc import Iterable, Sequence

import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

# Five and a half inches: at the width of a phone the letters are still about 10 pixels high.
WIDTH = 5.5
THEME = {
    **sns.axes_style("whitegrid"),
    "figure.dpi": 200,
    "figure.facecolor": "white",
    "font.size": 11,
    "axes.labelsize": 11,
    "axes.titlesize": 11,
    "legend.fontsize": 10,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.6,
}
COLOURS = sns.color_palette("colorblind")


class PageFigure(Figure):
    """A figure that shows itself in a cell without pyplot, which would keep it and draw it twice."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", bbox_inches="tight")
        return buffer.getvalue()


def stacked_axes(rows: int = 1, height: float = 3.4, share_y: bool = False) -> tuple[PageFigure, list[Axes]]:
    figure = PageFigure(figsize=(WIDTH, height * rows), layout="constrained")
    return figure, list(np.ravel(figure.subplots(rows, 1, sharex=True, sharey=share_y, squeeze=False)))


def legend_below(figure: Figure, axes: Axes, columns: int = 3, **look: object) -> None:
    """The curves of a panel, once each, below the figure; ``look`` is for matplotlib's legend."""
    named = {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=columns, columnspacing=1.2, **look)


def layer_ticks(axes: Axes, layers: Iterable[int]) -> None:
    axes.set_xticks(sorted(set(layers)))


# As many markers as have no factor in common with the ten colours: seventy models before two look alike.
MARKERS = "os^Dv<P"


def model_styles(models: Iterable[str | int]) -> dict[str | int, tuple[tuple[float, float, float], str]]:
    """A colour and a marker for each model, or whatever the curves are of, in the order of their first mention."""
    names = dict.fromkeys(models)
    return {name: (COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]) for i, name in enumerate(names)}


def model_legend(
    figure: Figure, styles: dict, untrained: bool, linestyle: str = "-", first: Sequence[Line2D] = ()
) -> None:
    """The models below the axes, after the lines ``first``, and what an untrained twin looks like if there is any."""
    look = {"markersize": 5, "linestyle": linestyle}
    handles = [*first, *(Line2D([], [], color=c, marker=m, label=name, **look) for name, (c, m) in styles.items())]
    if untrained:
        look["linestyle"] = linestyle and "--"
        handles.append(
            Line2D([], [], color="0.6", marker="o", markerfacecolor="white", label="the same, untrained", **look)
        )
    longest = max(len(handle.get_label()) for handle in handles)
    columns = 3 if longest <= 14 else 2 if longest <= 26 else 1
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, columnspacing=1.2, handletextpad=0.4)
