"""Figures of the part on training: queries, keys and attention along the checkpoints of a run."""

from collections.abc import Mapping, Sequence
from functools import partial

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from analysis_lib.errors import AnalysisError
from analysis_lib.figures.base import (
    COLOURS,
    MARKERS,
    THEME,
    WIDTH,
    PageFigure,
    legend_below,
    model_styles,
    stacked_axes,
)
from analysis_lib.figures.tables import Table
from analysis_lib.metrics.anisotropy import isotropic_cosine_quantile
from analysis_lib.papers.godey.dynamics import QUANTITIES, Dynamics, chance_band, heads_shown

_SPACES = {"query": ("queries", COLOURS[0], "o"), "key": ("keys", COLOURS[1], "s")}
_QUANTITIES = dict(zip(QUANTITIES, zip(COLOURS[:3], "os^", ("-", "--", ":"), strict=True), strict=True))
_BAND = {"color": "0.87", "linewidth": 0, "zorder": 0}
_legend = partial(legend_below, handletextpad=0.4)
_MEAN_COSINE = "cosine of mean query and mean key"


def _step_axis(axes: Axes, steps: Sequence[int]) -> None:
    """Steps on one scale in all figures: linear up to the first checkpoint after the start, logarithmic from there."""
    first, last = min((step for step in steps if step), default=1), max(*steps, 1)
    axes.set_xscale("symlog", linthresh=first, linscale=0.5)
    # More numbers, or one close to the first checkpoint, would touch in a narrow panel.
    between = (round(last / part) for part in (10, 100, 1000) if last / part > 2 * first)
    ticks = {0, first, last, *between}
    axes.set_xticks(sorted(ticks), [_short(tick) for tick in sorted(ticks)])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(-0.15 * first, last * 1.15)


def _short(step: int) -> str:
    return f"{step / 1e6:g}M" if step >= 1e6 else f"{step / 1e3:g}k" if step >= 1e4 else f"{step:g}"


def _first_seed(table: pd.DataFrame) -> pd.DataFrame:
    return table[table["seed"] == table["seed"].iloc[0]]


def _grid(count: int, height: float = 2.3) -> tuple[PageFigure, list[Axes]]:
    """Panels along the steps, two side by side, that share their axes."""
    columns = min(count, 2)
    rows = -(-count // columns)
    figure = PageFigure(figsize=(WIDTH, height * rows + 0.6), layout="constrained")
    panels = list(np.ravel(figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)))
    for axes in panels[count:]:
        axes.remove()
    for lowest in panels[max(0, count - columns) : count]:
        lowest.xaxis.set_tick_params(labelbottom=True)
        lowest.set_xlabel("step")
    return figure, panels[:count]


def _refuse_missing(asked: Sequence[int], table: pd.DataFrame, column: str) -> None:
    known = sorted(table[column].unique().tolist())
    if missing := [value for value in asked if value not in known]:
        raise AnalysisError(f"there is no {column} {missing[0]}: give some of {', '.join(map(str, known))}")


# --- Queries and keys -----------------------------------------------------------------------------


@mpl.rc_context(THEME)
def query_key_clouds(clouds: Mapping[str, pd.DataFrame], steps: Sequence[int]) -> Figure:
    """Sampled queries and keys at some steps: a row a step, a column a head (Godey et al. 2024, Fig. 11, 19, 20).

    Large markers are the means; the origin is where the two thin lines cross. The axes of a head are the same at
    every step of ``clouds``, shown or not.

    Args:
        clouds: by the name of a head, ``dynamics.cloud`` of it.
        steps: those to show.

    Raises:
        AnalysisError: a step without a checkpoint.
    """
    figure = PageFigure(figsize=(WIDTH, 1.9 * len(steps) + 0.9), layout="constrained")
    panels = figure.subplots(len(steps), len(clouds), sharex="col", sharey="col", squeeze=False)
    for column, (head, cloud) in zip(panels.T, clouds.items(), strict=True):
        _refuse_missing(steps, cloud, "step")
        for axes, step in zip(column, steps, strict=True):
            axes.axhline(0, color="0.3", linewidth=0.8, zorder=1)
            axes.axvline(0, color="0.3", linewidth=0.8, zorder=1)
            for space, (label, colour, marker) in _SPACES.items():
                part = cloud[(cloud["step"] == step) & (cloud["space"] == space)]
                axes.scatter(part["x"], part["y"], s=5, color=colour, marker=marker, alpha=0.3, linewidth=0)
                mean = {"markersize": 6, "markeredgecolor": "black", "linestyle": ""}
                axes.plot(part["x"].mean(), part["y"].mean(), marker=marker, color=colour, label=label, **mean)
            corner = {"transform": axes.transAxes, "va": "top", "fontsize": 10, "fontweight": "bold"}
            axes.text(0.03, 0.97, f"step {_short(step)}", **corner)
        column[0].set_title(head, fontsize=10)
        column[-1].set_xlabel("first direction")
        for direction in "xy":
            low, high = cloud[direction].min(), cloud[direction].max()
            margin = 0.05 * (high - low)
            column[0].set(**{f"{direction}lim": (min(low, 0) - margin, max(high, 0) + margin)})
    figure.supylabel("second direction", fontsize=11)
    _legend(figure, panels[0, 0], columns=2)
    return figure


@mpl.rc_context(THEME)
def mean_paths(paths: Mapping[str, pd.DataFrame]) -> Figure:
    """The way of the mean query and the mean key, an arrow a checkpoint (Godey et al. 2024, Fig. 12, 21, 22).

    A hollow marker is the start, a filled one the end.

    Args:
        paths: by the name of a head, ``dynamics.mean_path`` of it.
    """
    figure = PageFigure(figsize=(WIDTH, 3.0 * len(paths) + 0.5), layout="constrained")
    panels = np.ravel(figure.subplots(len(paths), 1, squeeze=False))
    for axes, (head, path) in zip(panels, paths.items(), strict=True):
        axes.axhline(0, color="0.3", linewidth=0.8, zorder=1)
        axes.axvline(0, color="0.3", linewidth=0.8, zorder=1)
        for space, (label, colour, marker) in _SPACES.items():
            x, y = path.loc[path["space"] == space, ["x", "y"]].to_numpy().T
            arrows = {"angles": "xy", "scale_units": "xy", "scale": 1, "width": 0.006, "headwidth": 4}
            axes.quiver(x[:-1], y[:-1], np.diff(x), np.diff(y), color=colour, zorder=2, **arrows)
            axes.plot(x[0], y[0], marker=marker, markersize=7, color=colour, markerfacecolor="white", zorder=3)
            ends = {"markersize": 7, "markeredgecolor": "black", "linestyle": "", "zorder": 3}
            axes.plot(x[-1], y[-1], marker=marker, color=colour, label=label, **ends)
        axes.set_title(head, fontsize=10)
        axes.margins(0.12)
        axes.update_datalim(path[["x", "y"]].to_numpy())
        axes.autoscale_view()
    panels[-1].set_xlabel("first direction")
    figure.supylabel("second direction", fontsize=11)
    _legend(figure, panels[0], columns=2)
    return figure


# --- Alignment ------------------------------------------------------------------------------------


def _cosine_lines(table: pd.DataFrame, lines: str, layers: Sequence[int], width: int) -> Figure:
    """Cosines along training, a panel a layer, and in grey the 99 % band of independent directions."""
    _refuse_missing(layers, table, "layer")
    figure, panels = _grid(len(layers))
    styles = model_styles(sorted(table[lines].unique()))
    band = chance_band(width)
    for axes, layer in zip(panels, layers, strict=True):
        axes.axhspan(-band, band, **_BAND)
        for name, (colour, marker) in styles.items():
            part = table[(table["layer"] == layer) & (table[lines] == name)].sort_values("step")
            look = {"marker": marker, "markersize": 3, "linewidth": 1.1, "color": colour}
            axes.plot(part["step"], part["cosine"], label=str(name), **look)
        axes.set_title(f"layer {layer}", fontsize=10)
        _step_axis(axes, table["step"])
        axes.set_ylim(-1.05, 1.05)
    figure.supylabel(_MEAN_COSINE, fontsize=11)
    _legend(figure, panels[0], columns=6, title=lines)
    return figure


@mpl.rc_context(THEME)
def alignment_along_training(alignment: pd.DataFrame, layers: Sequence[int], head_width: int) -> Figure:
    """Cosine of mean query and mean key along training: a panel a layer, a line a head (Godey et al. 2024, Fig. 13).

    In the grey band lie 99 % of the cosines of independent directions.

    Args:
        alignment: the ``qk_alignment`` table of a run; the first seed is shown.
        layers: attention layers to show.
        head_width: dimensions of a head.

    Raises:
        AnalysisError: the model has no such layer.
    """
    return _cosine_lines(_first_seed(alignment), "head", layers, head_width)


@mpl.rc_context(THEME)
def alignment_by_seed(cosines: pd.DataFrame, layers: Sequence[int], width: int) -> Figure:
    """The same with the heads of a layer concatenated: a panel a layer, a line a seed (Godey et al. 2024, Fig. 23).

    Args:
        cosines: ``dynamics.cosine_of_layers``.
        layers: attention layers to show.
        width: dimensions of all heads together.

    Raises:
        AnalysisError: the model has no such layer.
    """
    return _cosine_lines(cosines, "seed", layers, width)


def _depth_styles(layers: Sequence[int]) -> dict[int, dict]:
    """From dark (first layer) to light (last), three line styles in turn."""
    colours = sns.color_palette("cividis", len(layers))
    return {layer: {"color": colours[i], "linestyle": ["-", "--", ":"][i % 3]} for i, layer in enumerate(layers)}


@mpl.rc_context(THEME)
def dots_along_training(alignment: pd.DataFrame, head_width: int) -> Figure:
    """Scalar product of mean query and mean key along training, a line a head (Godey et al. 2024, Fig. 14).

    Above, the heads that end more similar than chance would have it; below, those that end more opposite. The thick
    line is the most similar, or the most opposite, of all.

    Args:
        alignment: the ``qk_alignment`` table of a run; the first seed is shown.
        head_width: dimensions of a head.
    """
    table = _first_seed(alignment)
    figure, panels = stacked_axes(rows=2, height=2.7)
    styles, band = _depth_styles(sorted(table["layer"].unique())), chance_band(head_width)
    ends = table[table["step"] == table["step"].max()].set_index(["layer", "head"])["cosine"]
    shown = heads_shown(table)
    beyond = {"similar": ends[ends > band], "opposite": ends[ends < -band]}
    by_head = dict(iter(table.sort_values("step").groupby(["layer", "head"])))
    for axes, (name, heads) in zip(panels, beyond.items(), strict=True):
        axes.axhline(0, color="0.3", linewidth=0.8, zorder=1)
        for layer, head in heads.index:
            part = by_head[layer, head]
            width = 3.2 if (layer, head) == shown[name] else 1.2
            axes.plot(part["step"], part["dot"], linewidth=width, label=str(layer), **styles[layer])
        axes.set(title=f"heads that end {name}: {len(heads)} of {len(ends)}")
        _step_axis(axes, table["step"])
    panels[-1].set_xlabel("step")
    figure.supylabel("scalar product of mean query and mean key", fontsize=11)
    handles = [Line2D([], [], label=str(layer), **style) for layer, style in styles.items()]
    figure.legend(handles=handles, title="layer", loc="outside lower center", ncols=6, columnspacing=1.2)
    return figure


@mpl.rc_context(THEME)
def entropy_along_training(entropy: pd.DataFrame) -> Figure:
    """Mean entropy of the attention rows along training, a line a layer (Godey et al. 2024, Fig. 15).

    Args:
        entropy: the ``attention_entropy`` table of a run; the mean over the heads of the first seed is shown.
    """
    figure, (axes,) = stacked_axes(height=4.0)
    means = _first_seed(entropy).groupby(["layer", "step"])["entropy_nats"].mean().unstack("step")
    for layer, style in _depth_styles(means.index).items():
        axes.plot(means.columns, means.loc[layer], label=str(layer), **style)
    axes.set(xlabel="step", ylabel="mean attention entropy (nats)")
    _step_axis(axes, means.columns)
    _legend(figure, axes, columns=6, title="layer")
    return figure


# --- Chance ---------------------------------------------------------------------------------------


@mpl.rc_context(THEME)
def alignment_against_chance(alignment: pd.DataFrame, head_width: int) -> Figure:
    """|cos| of mean query and mean key: the share of heads below it, at the first step and the last, and by chance.

    Args:
        alignment: the ``qk_alignment`` table of a run; the heads of all seeds are pooled.
        head_width: dimensions of a head.
    """
    figure, (axes,) = stacked_axes(height=3.8)
    shares = np.linspace(0, 1, 400)
    chance = [isotropic_cosine_quantile(head_width, (1 + share) / 2) for share in shares]
    axes.axvspan(0, chance_band(head_width), **_BAND)
    axes.plot(chance, shares, color="black", linestyle="--", label="independent directions")
    ends = {"first": (alignment["step"].min(), COLOURS[0], "o"), "last": (alignment["step"].max(), COLOURS[3], "^")}
    for step, colour, marker in ends.values():
        heads = np.sort(alignment.loc[alignment["step"] == step, "cosine"].abs())
        below = np.arange(1, len(heads) + 1) / len(heads)
        look = {"color": colour, "marker": marker, "markersize": 4, "drawstyle": "steps-post"}
        axes.plot(heads, below, label=f"step {_short(step)}", **look)
    axes.set(xlabel=f"|{_MEAN_COSINE}|", ylabel="share of heads below", xlim=(0, 1), ylim=(0, 1.02))
    _legend(figure, axes, columns=3)
    return figure


@mpl.rc_context(THEME)
def share_outside_chance(shares: pd.DataFrame) -> Figure:
    """The share of heads outside of the 99 % band along training: a panel a part of the layers, a line a seed.

    The shade is the 95 % interval of the first seed; the dashed line is 1 %, which chance gives.

    Args:
        shares: ``dynamics.outside_chance``.
    """
    parts = list(dict.fromkeys(shares["part"]))
    figure, panels = _grid(len(parts))
    styles = model_styles(shares["seed"].unique())
    for axes, part in zip(panels, parts, strict=True):
        for seed, (colour, marker) in styles.items():
            line = shares[(shares["part"] == part) & (shares["seed"] == seed)]
            axes.plot(line["step"], line["share"], marker=marker, markersize=3, color=colour, label=str(seed))
            if seed == shares["seed"].iloc[0]:
                band = {"color": colour, "alpha": 0.2, "linewidth": 0}
                axes.fill_between(line["step"], line["ci_low"], line["ci_high"], **band)
        axes.axhline(0.01, color="black", linestyle="--", linewidth=1)
        heads = shares.loc[shares["part"] == part, "heads"].iloc[0]
        axes.set_title(f"{'all layers' if part == 'all' else part}: {heads} heads", fontsize=10)
        _step_axis(axes, shares["step"])
        axes.set_ylim(-0.03, 1.03)
    figure.supylabel("share of heads beyond chance", fontsize=11)
    if len(styles) > 1:
        _legend(figure, panels[0], columns=6, title="seed")
    return figure


# --- The order of things --------------------------------------------------------------------------


@mpl.rc_context(THEME)
def quantities_along_training(axis: pd.DataFrame) -> Figure:
    """Anisotropy, alignment and sharpness along training, from the start (0) to the farthest point (1), by layer.

    Args:
        axis: ``dynamics.time_axis``; the first seed is shown.
    """
    table = _first_seed(axis)
    layers = sorted(table["layer"].unique())
    figure, panels = _grid(len(layers), height=1.6)
    for axes, layer in zip(panels, layers, strict=True):
        axes.axhline(0.5, color="0.3", linewidth=0.8, zorder=1)
        for quantity, (colour, marker, linestyle) in _QUANTITIES.items():
            part = table[(table["layer"] == layer) & (table["quantity"] == quantity)].sort_values("step")
            way = part["value"].to_numpy() - part["value"].iloc[0]
            farthest = way[np.abs(way).argmax()]
            look = {"color": colour, "marker": marker, "markersize": 2.5, "linestyle": linestyle, "linewidth": 1.3}
            axes.plot(part["step"], way / farthest if farthest else way, label=quantity, **look)
        axes.set_title(f"layer {layer}", fontsize=10)
        _step_axis(axes, table["step"])
    figure.supylabel("share of the way", fontsize=11)
    _legend(figure, panels[0], columns=1)
    return figure


@mpl.rc_context(THEME)
def half_way_steps(half: pd.DataFrame, steps: Sequence[int]) -> Figure:
    """When each layer is half-way in anisotropy, alignment and sharpness: a row a layer, a marker a quantity and seed.

    Args:
        half: ``dynamics.half_way``.
        steps: the checkpoints of the run.
    """
    layers = sorted(half["layer"].unique())
    figure, (axes,) = stacked_axes(height=1.6 + 0.3 * len(layers))
    for below, (quantity, (colour, marker, _)) in zip((-0.2, 0, 0.2), _QUANTITIES.items(), strict=True):
        part = half[half["quantity"] == quantity]
        look = {"color": colour, "marker": marker, "markersize": 6, "markeredgecolor": "white", "linestyle": ""}
        axes.plot(part["step"], part["layer"] + below, label=quantity, **look)
    axes.set_yticks(layers)
    axes.set(xlabel="step at half of the way", ylabel="attention layer", ylim=(max(layers) + 0.6, min(layers) - 0.6))
    _step_axis(axes, steps)
    _legend(figure, axes, columns=1)
    return figure


# --- The runs -------------------------------------------------------------------------------------


@mpl.rc_context(THEME)
def losses_along_training(runs: Mapping[str, Dynamics]) -> Figure:
    """The loss of each run: a panel a run, the batches thin, the texts held out with a marker and colour a seed.

    A run whose losses are not known says so.

    Args:
        runs: by name.
    """
    figure = PageFigure(figsize=(WIDTH, 2.7 * len(runs) + 0.4), layout="constrained")
    for axes, (name, found) in zip(np.ravel(figure.subplots(len(runs), 1, squeeze=False)), runs.items(), strict=True):
        losses = found["losses"]
        axes.set_title(name)
        if losses.empty:
            axes.text(0.5, 0.5, "the losses of this run were not published", ha="center", transform=axes.transAxes)
            axes.set_axis_off()
            continue
        for i, (seed, part) in enumerate(losses.groupby("seed", sort=False)):
            axes.plot(part["step"], part["loss"], color="0.75", linewidth=0.5, zorder=1)
            held_out = part.dropna(subset="held_out")
            look = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)], "markersize": 4}
            axes.plot(held_out["step"], held_out["held_out"], label=f"held out, seed {seed}", zorder=2, **look)
        axes.set(xlabel="step", ylabel="loss (nats a masked token)")
        _step_axis(axes, found.steps)
        axes.legend(loc="lower left")
    return figure


def runs_table(runs: Mapping[str, Dynamics], name: str, caption: str) -> Table:
    """What was trained: a column a run, and a row each for its size, its length and its loss.

    Args:
        runs: by name.
        name: the label of the table.
        caption: a sentence below its number.
    """
    facts = ["layers", "heads of a layer", "dimensions of a head", "seeds", "checkpoints", "steps"]
    facts += ["millions of tokens", "highest learning rate", "held-out loss at the start", "held-out loss at the end"]
    frame = pd.DataFrame({"": facts})
    for run, found in runs.items():
        heads = int(found["qk_alignment"]["head"].max())
        seeds = ", ".join(map(str, found.seeds))
        told = [found.layers, heads, found.head_width, seeds, len(found.steps), f"{found.steps[-1]:,}"]
        losses = found["losses"]
        held_out = losses.dropna(subset="held_out").groupby("seed")["held_out"]
        known = [
            f"{losses['tokens'].max() / 1e6:,.3g}",
            f"{losses['learning_rate'].max():.1g}",
            f"{held_out.first().mean():.2f}",
            f"{held_out.last().mean():.2f}",
        ]
        frame[run] = [*map(str, told), *(["–"] * len(known) if losses.empty else known)]
    return Table(frame, name, caption)
