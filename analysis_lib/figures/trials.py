"""Figures and tables of classifiers of self-attention, trained several times over, beside published numbers."""

from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis_lib.figures.base import COLOURS, THEME, WIDTH, PageFigure, model_styles
from analysis_lib.figures.tables import Table
from analysis_lib.papers.fosse.trials import beside_published

_SPACES = {"key": "keys", "value": "values"}
_OPEN = {"markerfacecolor": "white", "markersize": 6, "linestyle": "", "zorder": 3}


def trials_table(
    found: pd.DataFrame, published: pd.DataFrame, on: Sequence[str], name: str, caption: str, digits: int = 3
) -> Table:
    """Mean and spread of ours, the published number, and how many spreads lie between them.

    Args:
        found: from ``trials.trials_on``.
        published: with the columns of ``on``, and ``published``.
        on: what a number is about.
    """
    both = beside_published(found, published, on).drop(columns="seeds")
    names = {"entropy_weight": "λ", "spread": "spread over seeds", "difference": "difference in spreads"}
    # The spread of a few seeds does not carry more decimals of a ratio to it.
    ratios = ["–" if pd.isna(ratio) else f"{ratio:+.1f}" for ratio in both["difference"]]
    shown = both.assign(difference=ratios).rename(columns=names)
    if "λ" in shown:
        shown["λ"] = shown["λ"].map("{:g}".format)
    return Table(shown, name, caption, digits)


@mpl.rc_context(THEME)
def similarity_by_depth(found: pd.DataFrame, published: pd.DataFrame) -> Figure:
    """Similarity of keys and of values inside an utterance, by layer, a line a depth: a row a dataset.

    Bars are one standard deviation over seeds. Published numbers are open markers, where there are any.

    Args:
        found: from ``trials.trials_on``.
        published: from ``papers.published_depths``.
    """
    found = found[(found["entropy_weight"] == 0) & found["quantity"].isin([*_SPACES])]
    datasets, depths = list(dict.fromkeys(found["dataset"])), sorted(found["layers"].unique().tolist())
    styles = model_styles(depths)
    figure, panels = _pairs(len(datasets), share_y=True)
    for row, dataset in zip(panels, datasets, strict=True):
        for axes, (space, plural) in zip(row, _SPACES.items(), strict=True):
            ours = found[(found["dataset"] == dataset) & (found["quantity"] == space)]
            theirs = published[(published["dataset"] == dataset) & (published["quantity"] == space)]
            for i, (depth, (colour, marker)) in enumerate(styles.items()):
                look = {"color": colour, "marker": marker}
                part, told = ours[ours["layers"] == depth], theirs[theirs["layers"] == depth]
                summary = part.groupby("layer")["value"].agg(["mean", "std"])
                # Side by side, so that bars at the same layer do not hide each other.
                aside = 0.06 * (i - (len(depths) - 1) / 2)
                axes.errorbar(summary.index + aside, summary["mean"], summary["std"], **look, markersize=5, capsize=2)
                axes.plot(told["layer"] + aside, told["published"], **look, **_OPEN)
            axes.set_title(f"{dataset}: {plural}", fontsize=10)
            axes.set_xticks(range(1, max(depths) + 1))
    panels[0, 0].set_ylim(min(0.0, found["value"].min()) - 0.03, 1.05)
    for axes in panels[-1]:
        axes.set_xlabel("layer")
    figure.supylabel("similarity inside an utterance", fontsize=11)
    lines = [
        Line2D([], [], color=colour, marker=marker, markersize=5, label=f"{depth} layer{'s' * (depth > 1)}")
        for depth, (colour, marker) in styles.items()
    ]
    _legend(figure, lines, published["dataset"].isin(datasets).any())
    return figure


_BY_WEIGHT = {
    "entropy": "normalised entropy",
    "key": "similarity of keys",
    "value": "similarity of values",
    "key_norm": "mean norm of a key",
}


@mpl.rc_context(THEME)
def by_entropy_weight(found: pd.DataFrame, published: pd.DataFrame) -> Figure:
    """Entropy, similarities and norm of the keys against the weight of entropy in the loss; a line a dataset.

    Bars are one standard deviation over seeds; published numbers are open markers.

    Args:
        found: from ``trials.trials_on``; of it, the models of one layer.
        published: from ``papers.published_entropies``.
    """
    found = found[found["layers"] == 1]
    weights, styles = sorted(found["entropy_weight"].unique().tolist()), model_styles(found["dataset"])
    figure, panels = _pairs(2)
    for axes, (quantity, label) in zip(panels.flat, _BY_WEIGHT.items(), strict=True):
        for i, (dataset, (colour, marker)) in enumerate(styles.items()):
            look, aside = {"color": colour, "marker": marker}, 0.12 * (i - (len(styles) - 1) / 2)
            part = found[(found["dataset"] == dataset) & (found["quantity"] == quantity)]
            summary = part.groupby("entropy_weight")["value"].agg(["mean", "std"])
            places = np.array([weights.index(weight) for weight in summary.index]) + aside
            axes.errorbar(places, summary["mean"], summary["std"], **look, markersize=5, capsize=2)
            told = published[(published["dataset"] == dataset) & (published["quantity"] == quantity)]
            told = told[told["entropy_weight"].isin(weights)]
            axes.plot([weights.index(w) + aside for w in told["entropy_weight"]], told["published"], **look, **_OPEN)
        axes.set_title(label, fontsize=10)
        axes.set_xticks(range(len(weights)), [_weight(weight) for weight in weights])
        if quantity != "key_norm":
            axes.set_ylim(-0.05, 1.05)
        else:
            axes.set_ylim(bottom=0)
    for axes in panels[-1]:
        axes.set_xlabel("weight of entropy, λ")
    lines = [Line2D([], [], color=c, marker=m, markersize=5, label=name) for name, (c, m) in styles.items()]
    _legend(figure, lines, published["dataset"].isin(styles).any())
    return figure


def _weight(weight: float) -> str:
    return f"$10^{{{np.log10(weight):.0f}}}$" if 0 < weight < 0.01 and np.log10(weight) % 1 == 0 else f"{weight:g}"


@mpl.rc_context(THEME)
def similarity_by_variant(found: pd.DataFrame, published: pd.DataFrame) -> Figure:
    """Similarity of keys and of values of the first layer before training and after it, a row a variant.

    Bars are one standard deviation over seeds; the dashed line is the published number.

    Args:
        found: from ``trials.sensitivity``, of one dataset and one depth.
        published: from ``papers.published_depths``, of the same.
    """
    variants = list(dict.fromkeys(found["variant"]))
    figure = PageFigure(figsize=(WIDTH, 0.42 * len(variants) + 1.5), layout="constrained")
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    stages = {"untrained": (COLOURS[7], "s", "before training"), "trained": (COLOURS[0], "o", "after")}
    for axes, (space, plural) in zip(panels, _SPACES.items(), strict=True):
        for aside, (stage, (colour, marker, _)) in zip((-0.12, 0.12), stages.items(), strict=True):
            part = found[(found["stage"] == stage) & (found["quantity"] == space) & (found["layer"] == 1)]
            summary = part.groupby("variant")["value"].agg(["mean", "std"]).loc[variants]
            places = np.arange(len(variants)) + aside
            axes.errorbar(
                summary["mean"], places, xerr=summary["std"], color=colour, marker=marker, linestyle="", capsize=2
            )
        for value in published.loc[(published["quantity"] == space) & (published["layer"] == 1), "published"]:
            axes.axvline(value, color="0.3", linestyle="--", linewidth=1)
        axes.set_title(plural, fontsize=10)
        axes.set_xlabel("similarity")
    panels[0].set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
    panels[0].set_yticks(range(len(variants)), variants, fontsize=9)
    panels[0].invert_yaxis()
    panels[0].set_xlim(-0.05, 1.05)
    handles = [Line2D([], [], color=c, marker=m, linestyle="", label=label) for c, m, label in stages.values()]
    if len(published):
        handles.append(Line2D([], [], color="0.3", linestyle="--", linewidth=1, label="published"))
    figure.legend(handles=handles, loc="outside lower center", ncols=3, columnspacing=1.2, handletextpad=0.4)
    return figure


def _pairs(rows: int, share_y: bool = False) -> tuple[PageFigure, np.ndarray]:
    """Rows of two panels, over the same horizontal axis."""
    figure = PageFigure(figsize=(WIDTH, 2.3 * rows + 0.8), layout="constrained")
    return figure, figure.subplots(rows, 2, sharex=True, sharey=share_y, squeeze=False)


def _legend(figure: Figure, lines: list[Line2D], published: bool) -> None:
    if published:
        lines = [*lines, Line2D([], [], color="0.3", marker="o", label="published", **_OPEN)]
    figure.legend(handles=lines, loc="outside lower center", ncols=3, columnspacing=1.2, handletextpad=0.4)
