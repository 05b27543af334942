"""Figures of the part on the untrained block: what a bias of the inputs does to it, with bands over seeds."""

from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis_lib.figures.base import COLOURS, THEME, WIDTH, PageFigure, legend_below, model_styles, stacked_axes
from analysis_lib.papers.godey.untrained import DRAW, of_draw, over_seeds

_BIAS = "norm of the bias, N"
_INPUT = {"color": "black", "linestyle": "--", "marker": "", "label": "input"}


def _band(axes: Axes, table: pd.DataFrame, column: str, **look) -> None:
    """A line over the norm of the bias, the mean over seeds, with its 95 % interval."""
    for _, part in over_seeds(table, column).groupby("architecture", sort=False):
        axes.plot(part["bias_norm"], part["value"], **{"markersize": 4.5, **look})
        axes.fill_between(
            part["bias_norm"], part["ci_low"], part["ci_high"], color=look["color"], alpha=0.2, linewidth=0
        )


def _bands(axes: Axes, table: pd.DataFrame, column: str, **look) -> None:
    """Such a line for each architecture, in its colour and with its marker."""
    for i, (name, (colour, marker)) in enumerate(model_styles(table["architecture"]).items()):
        part = table[table["architecture"] == name]
        # Thinner on top of thicker: where two lines are one, both are seen.
        size = max(0, 3 - i)
        style = {"color": colour, "marker": marker, "label": name, "markersize": 4 + 1.7 * size}
        _band(axes, part, column, **{**style, "linewidth": 1.2 + 1.1 * size, **look})


def _hidden(vectors: pd.DataFrame, layer: int) -> pd.DataFrame:
    return vectors[(vectors["space"] == "hidden") & (vectors["layer"] == layer)]


@mpl.rc_context(THEME)
def block_cosines(vectors: pd.DataFrame) -> Figure:
    """Average cosine of inputs and outputs against the norm of the bias, and their difference (Godey, Fig. 6a).

    Args:
        vectors: of ``untrained.sweep``.
    """
    figure, (above, below) = stacked_axes(rows=2, height=2.9)
    inputs, outputs = _hidden(vectors, 0), _hidden(vectors, 1)
    # The inputs of all architectures follow one law, and those of the first stand for all.
    first = inputs[inputs["architecture"] == inputs["architecture"].iloc[0]]
    _bands(above, outputs, "cosine")
    _band(above, first, "cosine", **_INPUT)
    keys = [*DRAW, "bias_norm"]
    gain = outputs.set_index(keys)["cosine"] - inputs.set_index(keys)["cosine"]
    _bands(below, gain.reset_index(), "cosine")
    below.axhline(0, color="black", linewidth=1)
    above.set(ylabel="average cosine")
    below.set(ylabel="output minus input", xlabel=_BIAS)
    below.set_yscale("symlog", linthresh=1e-4)
    below.set_ylim(bottom=min(-1e-4, 1.5 * gain.min()))
    legend_below(figure, above)
    return figure


@mpl.rc_context(THEME)
def block_norms(vectors: pd.DataFrame) -> Figure:
    """The mean norm of inputs and outputs against that of the bias, and the norm of their mean (Godey, Fig. 6b).

    Args:
        vectors: of ``untrained.sweep``.
    """
    figure, panels = stacked_axes(rows=2, height=2.9, share_y=True)
    inputs = _hidden(vectors, 0)
    first = inputs[inputs["architecture"] == inputs["architecture"].iloc[0]]
    for axes, column, label in zip(
        panels, ("mean_norm", "norm_of_mean"), ("mean norm", "norm of the mean"), strict=True
    ):
        _bands(axes, _hidden(vectors, 1), column)
        _band(axes, first, column, **_INPUT)
        axes.set(ylabel=label)
    panels[-1].set_xlabel(_BIAS)
    legend_below(figure, panels[0])
    return figure


@mpl.rc_context(THEME)
def fixed_point_beside_layers(fixed: pd.DataFrame, norms: pd.DataFrame, model: str) -> Figure:
    """The mean norm of the hidden states of a trained model by layer, and N* of untrained blocks, both over √d.

    Args:
        fixed: columns architecture and fixed_point_over_root, N*/√d; one row a seed, NaN where there is none.
        norms: columns layer and norm_over_root.
        model: what the trained model is called.
    """
    figure, (axes,) = stacked_axes(height=3.8)
    axes.plot(norms["layer"], norms["norm_over_root"], marker="o", color="black", label=f"{model}, by layer")
    names = model_styles(fixed["architecture"])
    places = norms["layer"].max() + 1.5 + np.arange(len(names))
    for place, (name, (colour, marker)) in zip(places, names.items(), strict=True):
        values = fixed.loc[fixed["architecture"] == name, "fixed_point_over_root"].dropna()
        aside = place + np.linspace(-0.25, 0.25, len(values))
        axes.plot(aside, values, linestyle="", marker=marker, color=colour, markerfacecolor="none", markersize=6)
        if values.empty:
            axes.annotate("none", (place, 0), xytext=(0, 4), textcoords="offset points", ha="center")
    axes.axvline(places[0] - 0.75, color="0.5", linewidth=1)
    axes.axhline(1, color="black", linestyle="--", linewidth=1, label=r"$\sqrt{d}$")
    axes.set_xticks([*norms["layer"], *places], [*map(str, norms["layer"]), *names])
    for label in axes.get_xticklabels()[len(norms) :]:
        label.set(rotation=30, ha="right")
    axes.set(xlabel="layer (0: embedding output); N* of blocks", ylabel=r"norm over $\sqrt{d}$", ylim=(0, None))
    axes.legend(loc="upper left")
    return figure


def _shares(part: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """The share of the pairs in each bin, and the edges of the bins."""
    counts = part.groupby(["low", "high"])["count"].sum().reset_index()
    return (counts["count"] / counts["count"].sum()).to_numpy(), np.append(counts["low"], counts["high"].iloc[-1])


def _range(scores: pd.DataFrame) -> tuple[float, float]:
    """As wide as the scores go, on both sides of zero."""
    seen = scores[scores["count"] > 0]
    reach = 1.05 * max(-seen["low"].min(), seen["high"].max())
    return -reach, reach


@mpl.rc_context(THEME)
def score_histograms(
    scores: pd.DataFrame, attention: pd.DataFrame, shown: dict[str, Sequence[str | int]], norms: Sequence[float]
) -> Figure:
    """Scores before the softmax, all heads together: a row a norm of the bias, a column a draw (Godey, Fig. 7).

    Heights are shares of the pairs. A line marks the mean score.

    Args:
        scores, attention: of ``untrained.sweep``.
        shown: a title for each draw, given as architecture, weights_seed, direction_seed.
        norms: of the rows.
    """
    figure = PageFigure(figsize=(WIDTH, 1.15 * len(norms) + 0.8), layout="constrained")
    panels = figure.subplots(len(norms), len(shown), sharex=True, sharey="row", squeeze=False)
    limits = _range(pd.concat(of_draw(scores, draw) for draw in shown.values()))
    for column, (title, draw) in zip(panels.T, shown.items(), strict=True):
        for axes, norm in zip(column, norms, strict=True):
            part = of_draw(scores, draw)
            axes.stairs(*_shares(part[part["bias_norm"] == norm]), fill=True, color=COLOURS[0])
            means = of_draw(attention, draw)
            mean = means.loc[means["bias_norm"] == norm, "score"].mean()
            axes.axvline(mean, color=COLOURS[3], linestyle="--", linewidth=1.2)
            axes.set(xlim=limits, ylabel=f"N = {norm:g}" if axes in panels[:, 0] else "")
        column[0].set_title(title)
    figure.supxlabel("score before the softmax", fontsize=11)
    return figure


@mpl.rc_context(THEME)
def scores_by_head(
    scores: pd.DataFrame, attention: pd.DataFrame, shown: dict[str, Sequence[str | int]], norm: float
) -> Figure:
    """Scores before the softmax at one norm of the bias: a histogram a head, all equally high, a column a draw.

    The axes are the same at every norm. A dashed line marks the mean over heads.

    Args:
        scores, attention, shown: as for :func:`score_histograms`.
        norm: which one.
    """
    figure = PageFigure(figsize=(WIDTH, 4.2), layout="constrained")
    panels = figure.subplots(1, len(shown), sharex=True, sharey=True, squeeze=False)[0]
    limits = _range(pd.concat(of_draw(scores, draw) for draw in shown.values()))
    for axes, (title, draw) in zip(panels, shown.items(), strict=True):
        part, means = (table[table["bias_norm"] == norm] for table in (of_draw(scores, draw), of_draw(attention, draw)))
        for head, ridge in part.groupby("head"):
            axes.axhline(head, color="0.85", linewidth=0.6, zorder=0)
            shares, edges = _shares(ridge)
            colour = COLOURS[(head - 1) % len(COLOURS)]
            axes.stairs(head - 0.85 * shares / shares.max(), edges, baseline=head, fill=True, color=colour)
        axes.axvline(0, color="0.5", linewidth=0.8)
        axes.axvline(means["score"].mean(), color="black", linestyle="--", linewidth=1.2)
        heads = sorted(part["head"].unique())
        axes.set(title=title, xlim=limits, ylim=(heads[-1] + 0.4, 0), yticks=heads)
        axes.grid(visible=False, axis="y")
    panels[0].set_ylabel("head")
    figure.supxlabel("score before the softmax", fontsize=11)
    return figure


@mpl.rc_context(THEME)
def score_of_the_bias(attention: pd.DataFrame, norm: float) -> Figure:
    """The mean score of each head against the score that the bias alone has with itself: a point a head and draw.

    Args:
        attention: of ``untrained.sweep``.
        norm: of the bias.
    """
    figure, (axes,) = stacked_axes(height=4.2)
    part = attention[attention["bias_norm"] == norm]
    for name, (colour, marker) in model_styles(part["architecture"]).items():
        heads = part[part["architecture"] == name]
        look = {"markersize": 4.5, "markerfacecolor": "none", "linestyle": ""}
        axes.plot(heads["bias_score"], heads["score"], color=colour, marker=marker, label=name, **look)
    axes.axline((0, 0), slope=1, color="black", linestyle="--", linewidth=1, zorder=0)
    axes.set(xlabel="score of the bias with itself", ylabel="mean score of the head")
    legend_below(figure, axes, columns=4)
    return figure


@mpl.rc_context(THEME)
def queries_and_keys(vectors: pd.DataFrame) -> Figure:
    """Average cosine and mean norm of queries and keys against the norm of the bias (Godey, Fig. 8).

    Means over heads; filled markers are queries, hollow ones keys.

    Args:
        vectors: of ``untrained.sweep``.
    """
    figure, panels = stacked_axes(rows=2, height=2.9)
    for axes, column, label in zip(panels, ("cosine", "mean_norm"), ("average cosine", "mean norm"), strict=True):
        _bands(axes, vectors[vectors["space"] == "query"], column)
        keys = {"linestyle": ":", "markerfacecolor": "white", "label": "_keys"}
        _bands(axes, vectors[vectors["space"] == "key"], column, **keys)
        axes.set(ylabel=label)
    panels[0].plot([], [], color="0.5", linestyle=":", marker="o", markerfacecolor="white", label="keys (dotted)")
    panels[-1].set_xlabel(_BIAS)
    legend_below(figure, panels[0])
    return figure


_WEIGHTS = {
    "max": ("largest", COLOURS[3], "^"),
    "median": ("median", COLOURS[7], "o"),
    "min": ("smallest", COLOURS[0], "v"),
}


@mpl.rc_context(THEME)
def softmax_extremes(attention: pd.DataFrame, of: str = "row") -> Figure:
    """The largest, median and smallest attention weight against the norm of the bias, a panel an architecture.

    Args:
        attention: of ``untrained.sweep``.
        of: ``row``, means over rows (Godey, Fig. 9), or ``sequence``, the extremes of whole sequences (Fig. 10).
    """
    names = list(dict.fromkeys(attention["architecture"]))
    rows = -(-len(names) // 2)
    figure = PageFigure(figsize=(WIDTH, 2.4 * rows + 0.4), layout="constrained")
    panels = list(np.ravel(figure.subplots(rows, 2, sharex=True, squeeze=False)))
    for axes, name in zip(panels, names, strict=False):
        part = attention[attention["architecture"] == name]
        for kind, (label, colour, marker) in _WEIGHTS.items():
            if f"{of}_{kind}" in part:
                _band(axes, part, f"{of}_{kind}", color=colour, marker=marker, label=label)
        axes.set_title(name)
        low, high = part[f"{of}_min"].min(), part[f"{of}_max"].max()
        if high > 100 * low:
            axes.set_yscale("log")
        else:
            axes.ticklabel_format(axis="y", scilimits=(0, 0))
    for axes in panels[len(names) :]:
        axes.remove()
    for axes in panels[max(0, len(names) - 2) : len(names)]:
        axes.set_xlabel(_BIAS)
        axes.xaxis.set_tick_params(labelbottom=True)
    figure.supylabel("attention weight", fontsize=11)
    legend_below(figure, panels[0])
    return figure


@mpl.rc_context(THEME)
def divergence_by_bias(attention: pd.DataFrame) -> Figure:
    """What the attention rows lack to the largest entropy, against the norm of the bias; logarithmic.

    Args:
        attention: of ``untrained.sweep``.
    """
    figure, (axes,) = stacked_axes()
    _bands(axes, attention, "divergence")
    axes.set(xlabel=_BIAS, ylabel="ln n − entropy (nats)", yscale="log")
    legend_below(figure, axes, columns=4)
    return figure
