"""Anisotropy, alignment and sharpness of attention on one time axis: which of them changes first."""

import itertools
import math

import numpy as np
import pandas as pd

from analysis_lib.papers.godey.alignment import share
from analysis_lib.papers.godey.dynamics import Dynamics

# What changes in a layer along training, in the words of the figures.
QUANTITIES = ("anisotropy of the layer's input", "alignment of queries and keys", "sharpness of attention")


def quantities_by_layer(run: Dynamics) -> pd.DataFrame:
    """Anisotropy, alignment and sharpness of each attention layer at every step (Godey et al. 2024, sec. 6).

    Returns:
        Columns quantity (of ``QUANTITIES``), seed, step, layer and value: the average cosine of the hidden states
        that the layer reads; the mean |cos| of mean query and mean key over its heads; one minus the normalised
        attention entropy, over its heads.
    """
    hidden = run["anisotropy"].query("space == 'hidden'")
    # Attention layer l reads hidden layer l - 1; none reads the last.
    read = hidden.assign(layer=hidden["layer"] + 1).query(f"layer <= {run.layers}")
    aligned, entropy = run["qk_alignment"], run["attention_entropy"]
    values = (
        read.assign(value=read["cosine"]),
        aligned.assign(value=aligned["cosine"].abs()),
        entropy.assign(value=1 - entropy["entropy_normalised"]),
    )
    means = [table.groupby(["seed", "step", "layer"], sort=False)["value"].mean() for table in values]
    return pd.concat(means, keys=QUANTITIES, names=["quantity"]).reset_index()


def half_way_steps(quantities: pd.DataFrame) -> pd.DataFrame:
    """The step at which each quantity has covered half the distance from its start to its farthest point.

    Between two checkpoints the quantity is taken as linear.

    Args:
        quantities: of :func:`quantities_by_layer`.

    Returns:
        Columns seed, layer, quantity, start, farthest (the value that differs most from the start), end (that of the
        last step) and step, missing where the quantity does not change.
    """
    rows = []
    for keys, group in quantities.groupby(["seed", "layer", "quantity"], sort=False):
        ordered = group.sort_values("step")
        steps, values = ordered["step"].to_numpy(float), ordered["value"].to_numpy(float)
        distance = np.abs(values - values[0])
        farthest = int(distance.argmax())
        step = math.nan
        if distance[farthest] > 0:
            along = (values - values[0]) * np.sign(values[farthest] - values[0])
            after = int(np.argmax(along >= distance[farthest] / 2))
            step = np.interp(distance[farthest] / 2, along[after - 1 : after + 1], steps[after - 1 : after + 1])
        rows.append((*keys, values[0], values[farthest], values[-1], step))
    return pd.DataFrame(rows, columns=["seed", "layer", "quantity", "start", "farthest", "end", "step"])


def which_is_first(half: pd.DataFrame) -> pd.DataFrame:
    """Which of two quantities is half-way first in a layer, for each pair of quantities.

    Args:
        half: of :func:`half_way_steps`.

    Returns:
        One row per pair: first and second; first_step and second_step, the medians of their half-way steps; earlier,
        in how many layers (of all seeds) the first is half-way before the second; layers, how many there are in which
        both change; share, ci_low and ci_high (95 %, after Wilson, over layers).
    """
    wide = half.pivot(index=["seed", "layer"], columns="quantity", values="step")
    rows = []
    for first, second in itertools.combinations(QUANTITIES, 2):
        both = wide[[first, second]].dropna()
        earlier = both[first] < both[second]
        rows.append((first, second, *both.median(), earlier.sum(), len(both), *share(earlier)))
    columns = ["first", "second", "first_step", "second_step", "earlier", "layers", "share", "ci_low", "ci_high"]
    return pd.DataFrame(rows, columns=columns)
