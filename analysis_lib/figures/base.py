"""What all figures share: the theme, colours and markers, stacked axes, and numbered tables."""

import io
from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd
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


class Table:
    """A numbered table: MyST for the book, where ``{numref}`` reaches it by its name, and HTML in a notebook.

    Args:
        frame: what it shows, without its index.
        name: the label, such as ``tbl-verdicts``.
        caption: a sentence below its number.
        digits: decimals of the numbers.
    """

    def __init__(self, frame: pd.DataFrame, name: str, caption: str, digits: int = 3):
        self.frame, self.name, self.caption = frame, name, caption
        self.digits = digits

    def _cell(self, value: object) -> str:
        if value is pd.NA or (isinstance(value, float) and np.isnan(value)):
            return "–"
        if isinstance(value, float):
            return f"{value:z.{self.digits}f}"  # z: no minus before a zero
        return str(value).replace("|", r"\|")

    def _repr_html_(self) -> str:
        return self.frame.to_html(index=False, float_format=f"%.{self.digits}f", na_rep="–")

    def _repr_markdown_(self) -> str:
        header = " | ".join(self._cell(column) for column in self.frame.columns)
        # Numbers are read column-wise: they align on the right.
        rule = "|".join("---:" if pd.api.types.is_numeric_dtype(t) else ":---" for t in self.frame.dtypes)
        rows = [" | ".join(self._cell(v) for v in row) for row in self.frame.itertuples(index=False)]
        body = "\n".join(f"| {line} |" for line in (header, *rows))
        first, _, rest = body.partition("\n")
        return f":::{{table}} {self.caption}\n:name: {self.name}\n\n{first}\n|{rule}|\n{rest}\n:::\n"


def verdict_table(verdicts: pd.DataFrame, name: str, caption: str) -> Table:
    """The verdicts of ``papers.verdicts``: the claim, the number that decides it with its interval, the verdict.

    Those of ``papers.verdicts_by_model`` have the model in front, those of several corpora or variants the
    dataset or the variant.
    """
    numbers = [
        f"{quantity}: **{value:z.3f}**{_bracketed(low, high)}; the claim needs more than {bound:g}"
        for quantity, value, low, high, bound in verdicts[
            ["quantity", "value", "ci_low", "ci_high", "bound"]
        ].itertuples(index=False)
    ]
    shown = pd.DataFrame(
        {
            "verdict": "**" + verdicts["verdict"] + "**",
            "claim": verdicts["claim"] + " (" + verdicts["source"] + ")",
            "number that decides, with 95 % interval": numbers,
        }
    )
    for group in ("dataset", "model", "variant"):
        if group in verdicts:
            shown.insert(0, group, verdicts[group])
    return Table(shown, name, caption)


def _bracketed(low: float, high: float) -> str:
    """An interval after its number; nothing where there is none."""
    return "" if np.isnan(low) else f" [{low:z.3f}, {high:z.3f}]"


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
