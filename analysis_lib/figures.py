"""Tidy tables -> figures and numbered tables. Every function takes a table and returns what a cell can show."""

import io
from collections.abc import Iterable, Sequence

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from analysis_lib.errors import AnalysisError
from analysis_lib.metrics.anisotropy import isotropic_cosine_density, isotropic_cosine_quantile
from analysis_lib.metrics.attention_by_token_type import by_layer
from analysis_lib.metrics.drift import SIGNIFICANCE, drift_correlation

# Five and a half inches: at the width of a phone the letters are still about 10 pixels high.
WIDTH = 5.5
_THEME = {
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
_COLOURS = sns.color_palette("colorblind")
# A marker beside every colour, so that no curve is told by its colour alone.
_TYPES = {
    "all": ("all tokens", "black", "x"),
    "cls": ("[CLS]", _COLOURS[0], "o"),
    "sep": ("[SEP]", _COLOURS[1], "s"),
    "punct": ("comma or full stop", _COLOURS[2], "^"),
    "other": ("other", _COLOURS[7], "D"),
}
_SPACES = {
    "query": ("queries", _COLOURS[0], "o"),
    "key": ("keys", _COLOURS[1], "s"),
    "value": ("values", _COLOURS[2], "^"),
}


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

    Those of ``papers.verdicts_by_model`` have the model in front.
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
    if "model" in verdicts:
        shown.insert(0, "model", verdicts["model"])
    return Table(shown, name, caption)


def _bracketed(low: float, high: float) -> str:
    """An interval after its number; nothing where there is none."""
    return "" if np.isnan(low) else f" [{low:z.3f}, {high:z.3f}]"


def published_beside_ours(comparison: pd.DataFrame, name: str, caption: str) -> Table:
    """``papers.compare_table1`` as a table: ours, and the published number in brackets, one column per head."""
    cells = comparison.assign(
        cell=[f"{ours:.1f} ({paper:.1f})" for ours, paper in comparison[["ours", "published"]].itertuples(index=False)]
    )
    keys = ["layer", "dimension", "key_type"]
    wide = cells.pivot(index=keys, columns="head", values="cell").rename(columns=str)
    return Table(wide.loc[cells[keys].drop_duplicates().itertuples(index=False)].reset_index(), name, caption)


def _axes(rows: int = 1, height: float = 3.4, share_y: bool = False) -> tuple[PageFigure, list[Axes]]:
    figure = PageFigure(figsize=(WIDTH, height * rows), layout="constrained")
    return figure, list(np.ravel(figure.subplots(rows, 1, sharex=True, sharey=share_y, squeeze=False)))


def _layer_ticks(axes: Axes, layers: Iterable[int]) -> None:
    axes.set_xticks(sorted(set(layers)))


@mpl.rc_context(_THEME)
def anisotropy_by_layer(table: pd.DataFrame, width: int | None = None) -> Figure:
    """Average cosine of the hidden states against the layer, with its 95 % interval as a band.

    Args:
        table: the ``anisotropy`` table.
        width: dimensions of the hidden state; draws the 95th percentile of the cosine in an isotropic space.
    """
    hidden = table[table["space"] == "hidden"]
    figure, (axes,) = _axes()
    axes.plot(hidden["layer"], hidden["cosine"], marker="o", color=_COLOURS[0], label="average cosine")
    axes.fill_between(
        hidden["layer"],
        hidden["ci_low"],
        hidden["ci_high"],
        color=_COLOURS[0],
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
    _layer_ticks(axes, hidden["layer"])
    axes.legend(loc="best")
    return figure


@mpl.rc_context(_THEME)
def anisotropy_by_head(table: pd.DataFrame, width: int | None = None) -> Figure:
    """Average cosine of queries, keys and values: one point per head, one panel per space.

    Args:
        table: the ``anisotropy`` table.
        width: dimensions of a head; draws the 95th percentile of the cosine in an isotropic space.
    """
    figure, panels = _axes(rows=len(_SPACES), height=2.1, share_y=True)
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
        _layer_ticks(axes, part["layer"])
    panels[-1].set_xlabel("attention layer (heads side by side)")
    return figure


# As many markers as have no factor in common with the ten colours: seventy models before two look alike.
_MODEL_MARKERS = "os^Dv<P"


def _model_styles(models: Iterable[str]) -> dict[str, tuple[tuple[float, float, float], str]]:
    """A colour and a marker for each model, in the order of their first mention."""
    names = dict.fromkeys(models)
    return {
        name: (_COLOURS[i % len(_COLOURS)], _MODEL_MARKERS[i % len(_MODEL_MARKERS)]) for i, name in enumerate(names)
    }


def _model_legend(
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


@mpl.rc_context(_THEME)
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
    figure, (axes,) = _axes(height=4.0)
    if table.empty:
        axes.text(0.5, 0.5, "no model of this kind was given", ha="center", transform=axes.transAxes)
        axes.set_axis_off()
        return figure
    styles = _model_styles(table["model"])
    _model_lines(axes, table, x, "cosine", styles)
    axes.set(
        xlabel="layer (0: embedding output)" if x == "layer" else _DEPTH,
        ylabel="average cosine",
        ylim=(min(0, table["cosine"].min(), table["ci_low"].min()), None),
    )
    if x == "layer":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _model_legend(figure, styles, untrained=not table["trained"].all())
    return figure


@mpl.rc_context(_THEME)
def isotropic_density(dimensions: Sequence[int] = (4, 16, 64, 256, 1024)) -> Figure:
    """The density of the cosine of two random directions, a curve a dimension (Godey et al. 2024, Fig. 17).

    A marker on each curve is its 95th percentile.

    Args:
        dimensions: of the isotropic space, at least 2 each.
    """
    figure, (axes,) = _axes()
    # Twice as fine where the narrowest curve is high.
    cosine = np.sort(np.concatenate([np.linspace(-1, 1, 801), np.linspace(-0.2, 0.2, 801)]))
    styles = _model_styles(f"d = {d}" for d in dimensions)
    for d, (label, (colour, marker)) in zip(dimensions, styles.items(), strict=True):
        # In the plane the density has poles at the borders.
        density = isotropic_cosine_density(cosine, d)
        axes.plot(cosine, np.where(np.isfinite(density), density, np.nan), color=colour, label=label)
        percentile = np.array([isotropic_cosine_quantile(d)])
        axes.plot(percentile, isotropic_cosine_density(percentile, d), color=colour, marker=marker, markersize=6)
    axes.set(xlabel="cosine of two random directions", ylabel="density", xlim=(-1, 1), ylim=(0, None))
    _model_legend(figure, styles, untrained=False)
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


@mpl.rc_context(_THEME)
def cosine_against_dimension(points: pd.DataFrame) -> Figure:
    """The isotropic 95th percentile against the dimension, and the layers of models (Godey et al. 2024, Fig. 18).

    A point is the average cosine of a layer, hollow where the model is untrained; models of the same width stand
    side by side. In the grey below the line lie 95 % of the cosines of random directions.

    Args:
        points: columns model, layer, dimensions, cosine, trained.
    """
    figure, (axes,) = _axes(height=4.0)
    low, high = points["dimensions"].min(), points["dimensions"].max()
    curve = np.unique(np.geomspace(max(2, low / 4), 4 * high, 200).astype(int))
    isotropic = [isotropic_cosine_quantile(int(d)) for d in curve]
    percentile = axes.plot(curve, isotropic, color="black", linestyle="--", label="isotropic, 95th percentile")
    axes.fill_between(curve, -1, isotropic, color="0.9", linewidth=0)
    styles = _model_styles(points["model"])
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
    _model_legend(figure, styles, untrained=not points["trained"].all(), linestyle="", first=percentile)
    return figure


# Of the isotropy table: what an isotropic cloud has, and how the axis says it.
_ISOTROPY = {
    "deviations": (0, "standard deviations\nof an isotropic cosine"),
    "effective_share": (1, "effective dimension\nas a share of d"),
    "isoscore": (1, "IsoScore"),
}


@mpl.rc_context(_THEME)
def isotropy_by_model(table: pd.DataFrame) -> Figure:
    """Three measures of isotropy against the depth: a panel a measure, a line a model, dashed what isotropy has.

    The panels of the effective dimension and of IsoScore are logarithmic, and 1 is isotropic in both.

    Args:
        table: columns model, trained, layer and those of the ``isotropy`` table.
    """
    finite = table["effective_dimension"].where(np.isfinite(table["effective_dimension"]))
    table = table.assign(effective_share=finite / table["dimensions"])
    figure, panels = _axes(rows=len(_ISOTROPY), height=2.8)
    styles = _model_styles(table["model"])
    for axes, (measure, (isotropic, label)) in zip(panels, _ISOTROPY.items(), strict=True):
        line = axes.axhline(isotropic, color="black", linestyle="--", linewidth=1.2, label="isotropic")
        _model_lines(axes, table, "depth", measure, styles, bands=measure == "deviations")
        axes.set(ylabel=label, yscale="log" if isotropic else "linear")
    panels[-1].set_xlabel(_DEPTH)
    _model_legend(figure, styles, untrained=not table["trained"].all(), first=[line])
    return figure


@mpl.rc_context(_THEME)
def dimensions_in_use(points: pd.DataFrame) -> Figure:
    """In how many dimensions the vectors of a layer lie, seen from the origin and seen from their mean.

    A point is a layer, hollow where the model is untrained. On the dashed line the two are the same. Above it, the
    mean hides dimensions that the cloud uses around it; below it, a few long vectors outweigh the others.

    Args:
        points: ``metrics.isotropy.against_isoscore``, with columns model and trained.
    """
    figure, (axes,) = _axes(height=4.4)
    styles = _model_styles(points["model"])
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
    _model_legend(figure, styles, untrained=not points["trained"].all(), linestyle="", first=[same])
    return figure


# A p-value below this is drawn here: where the correlation is perfect it is 0, which has no logarithm.
_LEAST_P = 1e-12


@mpl.rc_context(_THEME)
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
    figure, (axes,) = _axes(height=1.2 + 0.32 * len(correlations))
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
            color=_COLOURS[0],
            markerfacecolor=_COLOURS[0] if model["enough"] else "white",
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


@mpl.rc_context(_THEME)
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


@mpl.rc_context(_THEME)
def dimension_means(table: pd.DataFrame, outliers: pd.DataFrame, shown: int = 3) -> Figure:
    """Mean of each dimension of the hidden state over all tokens, one line per layer (Maruta & Matsuzaki 2024, Fig. 1).

    Args:
        table: the ``dimension_means`` table.
        outliers: ``metrics.outlier_dimensions.persistence``; the first ``shown`` are named in the figure.
    """
    means = table[table["token_type"] == "all"].pivot(index="dimension", columns="layer", values="mean")
    figure, (axes,) = _axes(height=3.8)
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


@mpl.rc_context(_THEME)
def outlier_values(table: pd.DataFrame, dimensions: Sequence[int]) -> Figure:
    """Mean value of each outlier dimension by token type, against the layer (Maruta and Matsuzaki 2024, Fig. 3)."""
    figure, panels = _axes(rows=max(1, len(dimensions)), height=2.4)
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


@mpl.rc_context(_THEME)
def attention_by_token_type(table: pd.DataFrame, column: str = "weight") -> Figure:
    """Attention per type of key against the layer, mean over heads (Maruta and Matsuzaki 2024, Fig. 2).

    Args:
        table: the ``attention_by_token_type`` table.
        column: ``weight``, the mean weight per key, as the paper shows it, or ``mass``, the total per query.
    """
    figure, (axes,) = _axes()
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
    _layer_ticks(axes, table["layer"])


def _type_legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, columnspacing=1.2, handletextpad=0.4)


@mpl.rc_context(_THEME)
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
    figure, panels = _axes(len(layers), height=height)
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
