"""How far mean queries and mean keys align along training, and how far they would by chance."""

import math

import numpy as np
import pandas as pd
from jaxtyping import Float
from scipy import stats

from analysis_lib.metrics.anisotropy import isotropic_cosine_quantile
from analysis_lib.metrics.intervals import wilson
from analysis_lib.papers.godey.dynamics import Dynamics

# A cosine outside the 99 % band of independent directions is not put down to chance.
BAND = 0.99
# Layers that the figures of section 5 and appendix D show, of the 12 of a MultiBERT, here counted from 1.
SHOWN_LAYERS = {13: (1, 5, 10, 12), 23: (1, 3, 7, 12)}


def layers_of_figure(figure: int, depth: int) -> list[int]:
    """The attention layers of Figure 13 or 23, and those at the same relative depth of another model.

    >>> layers_of_figure(13, 12), layers_of_figure(23, 6)
    ([1, 5, 10, 12], [1, 2, 4, 6])
    """
    return sorted({1 + round((layer - 1) / 11 * (depth - 1)) for layer in SHOWN_LAYERS[figure]})


def chance_band(head_width: int) -> float:
    """The cosine that two independent directions of a head stay below, in magnitude, 99 times in 100.

    >>> round(chance_band(64), 3)
    0.317
    """
    return isotropic_cosine_quantile(head_width, (1 + BAND) / 2)


def chance_of_cosine(cosine: Float[np.ndarray, "*points"], head_width: int) -> Float[np.ndarray, "*points"]:
    r"""The probability P(|cos| ≥ |c|) that two independent directions of a head are as much alike, or as opposite.

    (1 + cos) / 2 follows a Beta((d − 1)/2, (d − 1)/2) law, so that it is twice the upper tail at (1 + |c|) / 2.

    Args:
        cosine: c, of either sign.
        head_width: d, the dimensions of the head.

    >>> chance_of_cosine(np.array([0.0, 0.5, -0.5]), 3)  # uniform: Archimedes' hat box
    array([1. , 0.5, 0.5])
    """
    half = (head_width - 1) / 2
    return 2 * stats.beta.sf((1 + np.abs(cosine)) / 2, half, half)


def aligned_since(run: Dynamics) -> pd.DataFrame:
    """The first checkpoint from which, to the last, the mean query and key of a head are beyond :func:`chance_band`.

    Returns:
        Columns seed, layer, head, cosine (at the last step) and step, missing where the head ends within the band.
    """
    band, rows = chance_band(run.head_width), []
    for keys, group in run["qk_alignment"].groupby(["seed", "layer", "head"], sort=False):
        ordered = group.sort_values("step")
        inside = np.flatnonzero(ordered["cosine"].abs() <= band)
        since = inside[-1] + 1 if len(inside) else 0
        step = ordered["step"].iloc[since] if since < len(ordered) else math.nan
        rows.append((*keys, ordered["cosine"].iloc[-1], step))
    return pd.DataFrame(rows, columns=["seed", "layer", "head", "cosine", "step"])


def third_of_layers(table: pd.DataFrame, depth: int) -> pd.Series:
    """Which third of the layers each row lies in. Of 4 layers, the first and last third have one, the middle two.

    Args:
        table: with a column layer, counted from 1.
        depth: how many layers there are.
    """
    size = max(1, round(depth / 3))
    layer = table["layer"]
    names = np.select([layer <= size, layer > depth - size], ["first third", "last third"], "middle third")
    return pd.Series(names, table.index)


def outside_chance(run: Dynamics) -> pd.DataFrame:
    """The share of heads whose mean query and mean key are more alike, or more opposite, than chance would have them.

    Returns:
        One row per seed, step and part of the layers (``first third``, ``middle third``, ``last third`` and ``all``):
        seed, step, part, heads (how many), share (with |cos| above :func:`chance_band`), ci_low and ci_high (95 %,
        after Wilson, over heads).
    """
    table = run["qk_alignment"]
    outside = table.assign(
        outside=table["cosine"].abs() > chance_band(run.head_width), part=third_of_layers(table, run.layers)
    )
    rows = []
    for part in (outside, outside.assign(part="all")):
        for keys, group in part.groupby(["seed", "step", "part"], sort=False):
            count = int(group["outside"].sum())
            rows.append((*keys, len(group), count / len(group), *wilson(count, len(group))))
    columns = ["seed", "step", "part", "heads", "share", "ci_low", "ci_high"]
    return pd.DataFrame(rows, columns=columns).sort_values(["seed", "step"], kind="stable", ignore_index=True)


def cosine_of_layers(run: Dynamics) -> pd.DataFrame:
    """The cosine of mean query and mean key with the heads of a layer concatenated (Godey et al. 2024, Fig. 23).

    Returns:
        Columns seed, step, layer and cosine.
    """
    keys = ["seed", "step", "layer"]
    means = run["head_means"]
    queries, keyed = (means[means["space"] == space].drop(columns="space") for space in ("query", "key"))
    pairs = queries.merge(keyed, on=[*keys, "head", "dimension"], suffixes=("_query", "_key"))
    q, k = pairs["mean_query"], pairs["mean_key"]
    sums = pairs[keys].assign(dot=q * k, q=q**2, k=k**2).groupby(keys, sort=False).sum().reset_index()
    return sums[keys].assign(cosine=sums["dot"] / np.sqrt(sums["q"] * sums["k"]))
