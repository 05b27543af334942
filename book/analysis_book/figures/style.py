"""The look of every figure, the band of an interval, and the axis of the steps of a run."""

import atexit
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from IPython import get_ipython
from matplotlib import font_manager, rc_params_from_file
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullLocator

from analysis_book.figures.tables import OTHER_NAMES, TYPE_NAMES

# Fonts with Chinese, Japanese and Korean characters.
SCRIPTS = (
    "Noto Sans CJK JP",
    "Noto Sans CJK SC",
    "WenQuanYi Zen Hei",
    "IPAGothic",
    "Hiragino Sans",
    "Microsoft YaHei",
)
# Told apart by the colour-blind, and seen at a contrast of 3 on white and on black.
COLOURS = ("#0173b2", "#d55e00", "#b56bab", "#029e73", "#8c8c8c")
# The colour of each type of token in every figure, as the ``palette`` of seaborn's functions: by
# its name in tables, such as ``cls``, and by that which a reader sees, such as ``[CLS]``.
TYPE_COLOURS = dict(zip(TYPE_NAMES, (*COLOURS, "#000000"), strict=True))
# Types that stand in one table have colours of their own.
_BLUE, _ORANGE, _, _GREEN, _ = COLOURS
_OTHER_COLOURS = (
    *("#6d6d6d", _BLUE, _ORANGE, _GREEN, "#000000"),
    *(_BLUE, _GREEN),
    *("#9a6324", "#5b4a8a", "#00798c", "#a8326f", "#6b7a00"),
)
TYPE_COLOURS |= dict(zip(OTHER_NAMES, _OTHER_COLOURS, strict=True))
_NAMES = TYPE_NAMES | OTHER_NAMES
TYPE_COLOURS |= {_NAMES[kind]: colour for kind, colour in TYPE_COLOURS.items()}
# The ink of a figure, and what stands for it on a dark page. The edge of a marker is the ground.
# Seaborn writes on bright cells of a heat map in #262626, which stays.
DARK_INKS = {
    "fill: #000000": "#ffffff",
    "stroke: #000000": "#ffffff",
    "fill: #252525": "#e3e3e3",
    "stroke: #252525": "#e3e3e3",
    "stroke: #4c4c4c": "#b3b3b3",
    "stroke: #cccccc": "#4b535f",
    "stroke: #ffffff": "#14181e",
}
# What matplotlib writes at the shape of a marker and again wherever it is drawn.
EDGE = re.compile(r'(<path id="[^"]*" [^>]*style=")stroke: #\w+; ')
RC = rc_params_from_file(Path(__file__).with_name("theme.mplstyle"), use_default_template=False)


def theme() -> None:
    """Set seaborn's theme for the figures that follow, on no ground.

    Its colours are those that the colour-blind can tell apart. In a script, the ground is white,
    and the figures that are still open at its end are saved as ``figure-1.png``, ``figure-2.png``,
    ... in the current folder; ``plt.show()`` shows and closes them first.
    """
    # Of these, what the machine has: names of models and texts may be in any script.
    there = {font.name for font in font_manager.fontManager.ttflist}
    fonts = {"font.sans-serif": ["DejaVu Sans", *(font for font in SCRIPTS if font in there)]}
    sns.set_theme(style="whitegrid", palette="colorblind", rc=RC | fonts)
    if get_ipython() is None:
        plt.rcParams.update({"figure.facecolor": "white", "axes.facecolor": "white"})
        atexit.unregister(_save_open_figures)
        atexit.register(_save_open_figures)


def _save_open_figures() -> None:
    for number in plt.get_fignums():
        plt.figure(number).savefig(f"figure-{number}.png", bbox_inches="tight")


def themed(svg: str) -> str:
    """A figure as matplotlib or Vega writes it, with a rendering for dark pages in the same file.

    ``figure.svg#dark`` has light ink and the same colours; ``figure.svg`` is as it was. Heat maps
    are the same in both, but for the numbers around them.
    """
    # What is black has no colour in the file; Vega's ink is that of the page.
    rules = ["#dark:target { fill: #ffffff; color: #e3e3e3 }"]
    for ink, light in DARK_INKS.items():
        attribute = ink.partition(":")[0]
        rules.append(f'#dark:target [style*="{ink}"] {{ {attribute}: {light} !important }}')
    style = f"<style>{' '.join(rules)}</style>"
    svg = EDGE.sub(r"\1", svg)
    return re.sub(r"<svg ([^>]*)>", rf'<svg id="dark" \1>{style}', svg, count=1)


def band(
    x: str,
    *,
    data: pd.DataFrame,
    hue: str | None = None,
    palette: str | Mapping[str, str] | None = None,
    units: str | None = None,
    ax: Axes | None = None,
    **_: object,
) -> None:
    """Shade between the columns ``ci_low`` and ``ci_high`` of a table, against a third.

    The colours are those that ``seaborn.lineplot`` gives to the same column of names. It can also
    be mapped onto panels: ``grid.map_dataframe(figures.band, "layer", hue="model")``.

    Args:
        x: the column of the horizontal axis.
        data: the table, with the ends of the intervals.
        hue: the column whose values have a colour and a band each.
        palette: the colours, as ``lineplot`` takes them; those of the theme by default.
        units: the column whose values have a band each in the same colour, as the ``units`` of
            ``lineplot`` have lines.
        ax: where to draw; the current axes by default.
    """
    ax = ax or plt.gca()
    groups = [(None, data)]
    if hue is not None:
        groups = list(data.groupby(hue, sort=False, observed=True))
    if isinstance(palette, Mapping):
        colours = [palette[name] for name, _ in groups]
    else:
        colours = sns.color_palette(palette, n_colors=len(groups))
    for (_, rows), colour in zip(groups, colours, strict=True):
        parts = [(None, rows)] if units is None else rows.groupby(units)
        for _, unit in parts:
            unit = unit.sort_values(x)
            ax.fill_between(
                unit[x], unit["ci_low"], unit["ci_high"], color=colour, alpha=0.2, linewidth=0
            )


def heat(
    *,
    data: pd.DataFrame,
    x: str,
    y: str,
    value: str,
    **options: object,
) -> None:
    """A heat map of one column against two others, on a panel.

    It is mapped onto a grid: ``grid.map_dataframe(figures.heat, x="head", ...)``.
    """
    options.pop("color", None)
    cells = data.pivot(index=y, columns=x, values=value)
    axes = sns.heatmap(cells, cmap="cividis", ax=plt.gca(), rasterized=cells.size > 400, **options)
    axes.set(xlabel="", ylabel="")


def whole_numbers(drawn: Axes | sns.axisgrid.Grid) -> None:
    """Give a horizontal axis, such as that of layers, whole numbers alone."""
    for axes in _axes(drawn):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def log_axis(drawn: Axes | sns.axisgrid.Grid) -> None:
    """Give a vertical axis a logarithmic scale with plain numbers.

    They are there also where it spans less than a power of ten.
    """
    for axes in _axes(drawn):
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        multiples = (1, 3) if high > 10 * low else (1, 1.5, 2, 3, 5, 7)
        axes.yaxis.set_major_locator(LogLocator(subs=multiples))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_locator(NullLocator())


def _axes(drawn: Axes | sns.axisgrid.Grid) -> list[Axes]:
    return [drawn] if isinstance(drawn, Axes) else [*drawn.axes.flat]


def legend_below(
    drawn: Axes | sns.axisgrid.Grid,
    ncols: int = 4,
    **options: object,
) -> None:
    """Move the legend of axes, or of a grid, below them, where a phone has room for it.

    It loses its title.

    Args:
        drawn: what seaborn returned.
        ncols: columns of the legend.
        options: as ``seaborn.move_legend`` takes it.
    """
    anchor = (0.5, -0.2) if isinstance(drawn, Axes) else (0.5, 0)
    defaults = {"bbox_to_anchor": anchor, "ncols": ncols, "title": None, "columnspacing": 1}
    sns.move_legend(drawn, "upper center", **defaults | options)
    if not isinstance(drawn, Axes):
        # Where the legend stood, beside the panels, it has left a gap, out of whose middle it would
        # hang.
        drawn.figure.subplots_adjust(right=0.98)


def step_axis(axes: Axes, steps: Iterable[int]) -> None:
    """Give steps one scale: linear up to the first checkpoint after the start, then logarithmic.

    Args:
        axes: whose horizontal axis it is.
        steps: of the checkpoints.
    """
    steps = list(steps)
    first = min((step for step in steps if step), default=1)
    last = max(*steps, 1)
    axes.set_xscale("symlog", linthresh=first, linscale=0.5)
    ticks = {0, first, last}
    # More numbers, or one close to the first checkpoint, would touch in a narrow panel.
    for part in (10, 100, 1000):
        if last / part > 2 * first:
            ticks.add(round(last / part))
    axes.set_xticks(sorted(ticks))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(-0.15 * first, last * 1.15)
