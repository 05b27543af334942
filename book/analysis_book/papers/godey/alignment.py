"""How far mean queries and mean keys align along training, and how far they would by chance."""

import itertools
import math

import numpy as np
import pandas as pd
from jaxtyping import Float
from scipy import stats

from analysis_book.papers.godey.dynamics import Dynamics
from analysis_lib.metrics.anisotropy import isotropic_cosine_quantile
from analysis_lib.metrics.intervals import FEWEST_SEEDS, Estimate, jackknife

# A cosine outside the 99 % band of independent directions is not put down to chance.
BAND = 0.99


def chance_dimensions(run: Dynamics) -> float:
    r"""The dimensions in which the mean queries and keys of a head are independent directions
    before training.

    That is d', the width of a head, unless queries and keys are rotated by their positions: their
    means then keep little of the dimensions that turn fast. With s_j the mean of the squares of
    dimension j over the unit means of all heads at the first step, the number is the participation
    ratio (Σ s_j)² / Σ s_j²: in as many dimensions the cosine of independent directions has the same
    variance. Each s_j² is divided by 1 + 2/n, since the mean of n squares of a Gaussian variable
    varies.

    Returns:
        A number from 1 to d'.
    """
    # Values are not rotated.
    start = run["head_means"].query("step == step.min() and space != 'value'")
    means = start.pivot(
        index=["seed", "layer", "head", "space"], columns="dimension", values="mean"
    ).to_numpy()
    squares = np.square(means / np.linalg.norm(means, axis=1, keepdims=True)).mean(0)
    ratio = (1 + 2 / len(means)) * squares.sum() ** 2 / np.square(squares).sum()
    return float(np.clip(ratio, 1, run.head_width))


def chance_band(dimensions: float) -> float:
    """The cosine that two independent directions stay below, in magnitude, 99 times in 100.

    >>> round(chance_band(64), 3)
    0.317
    """
    return isotropic_cosine_quantile(dimensions, (1 + BAND) / 2)


def chance_of_cosine(
    cosine: Float[np.ndarray, "*points"], dimensions: float
) -> Float[np.ndarray, "*points"]:
    r"""The probability P(|cos| ≥ |c|) that two independent directions are as much alike, or as
    opposite.

    (1 + cos) / 2 follows a Beta((d − 1)/2, (d − 1)/2) law, so that it is twice the upper tail at (1
    + |c|) / 2.

    Args:
        cosine: c, of either sign.
        dimensions: d, of the directions.

    >>> chance_of_cosine(np.array([0.0, 0.5, -0.5]), 3)  # uniform: Archimedes' hat box
    array([1. , 0.5, 0.5])
    """
    half = (dimensions - 1) / 2
    return 2 * stats.beta.sf((1 + np.abs(cosine)) / 2, half, half)


def head_ends(run: Dynamics) -> pd.DataFrame:
    """Where the mean query and key of each head end, and when they are first beyond chance on that
    side.

    Returns:
        Columns seed, layer, head, part (:func:`third_of_layers`), cosine (at the last step), ends
        (``similar`` or ``opposite``, beyond :func:`chance_band`, or ``within the band``) and onset:
        the share of the run after which the cosine is first beyond the band on the side where it
        ends; missing where it ends within.
    """
    keys, band = ["seed", "layer", "head"], chance_band(chance_dimensions(run))
    table = run["qk_alignment"].sort_values("step", kind="stable").set_index(keys)
    last = table.groupby(keys)["cosine"].last()
    side = np.sign(last).where(last.abs() > band, 0.0)
    beyond = table["cosine"] * side.reindex(table.index) > band
    heads = pd.DataFrame(
        {"cosine": last, "ends": side.map({1: "similar", -1: "opposite", 0: "within the band"})}
    )
    heads["onset"] = table.loc[beyond, "step"].groupby(keys).min() / max(run.steps[-1], 1)
    heads = heads.reset_index()
    heads.insert(3, "part", third_of_layers(heads, run.layers))
    return heads


def third_of_layers(table: pd.DataFrame, depth: int) -> pd.Series:
    """Which third of the layers each row lies in. Of 4 layers, the first and last third have one,
    the middle two.

    Args:
        table: with a column layer, counted from 1.
        depth: how many layers there are.
    """
    size = max(1, round(depth / 3))
    layer = table["layer"]
    names = np.select(
        [layer <= size, layer > depth - size], ["first third", "last third"], "middle third"
    )
    return pd.Series(names, table.index)


def cosine_of_layers(run: Dynamics) -> pd.DataFrame:
    """The cosine of mean query and mean key with the heads of a layer concatenated (Godey et al.
    2024, Fig. 23).

    Returns:
        Columns seed, step, layer and cosine.
    """
    keys = ["seed", "step", "layer"]
    means = run["head_means"].pivot(
        index=[*keys, "head", "dimension"], columns="space", values="mean"
    )
    products = {
        "dot": means["query"] * means["key"],
        "query": means["query"] ** 2,
        "key": means["key"] ** 2,
    }
    sums = pd.DataFrame(products).groupby(keys).sum()
    return (sums["dot"] / np.sqrt(sums["query"] * sums["key"])).rename("cosine").reset_index()


def agreement_of_seeds(run: Dynamics) -> Estimate:
    """The correlation over steps of the cosines of two seeds, with the heads of a layer
    concatenated.

    Mean over layers and pairs of seeds, with a jackknife interval over seeds; fewer than five have
    none.
    """
    if len(run.seeds) < 2:
        return Estimate(math.nan)
    wide = cosine_of_layers(run).pivot(index="step", columns=["seed", "layer"], values="cosine")
    pairs = [*itertools.combinations(run.seeds, 2)]
    of_pairs = np.array([wide[one].corrwith(wide[other]).mean() for one, other in pairs])
    without = [
        [seed not in pair for pair in pairs] for seed in run.seeds if len(run.seeds) >= FEWEST_SEEDS
    ]
    return jackknife(of_pairs.mean(), [of_pairs[kept].mean() for kept in without])
