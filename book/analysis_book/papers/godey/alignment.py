"""How far mean queries and mean keys align along training, and how far they would by chance."""

import itertools
import math

import numpy as np
import pandas as pd
from jaxtyping import Float
from scipy import stats

from analysis_book.training.dynamics import Dynamics
from analysis_lib.metrics.anisotropy import isotropic_cosine_quantile
from analysis_lib.metrics.intervals import FEWEST_SEEDS, Estimate, jackknife

# A cosine outside the 99 % band of independent directions is not put down to chance.
BAND = 0.99


def chance_dimensions(run: Dynamics) -> float:
    r"""The dimensions in which mean queries and keys are independent directions before training.

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
    rows = ["seed", "layer", "head", "space"]
    means = start.pivot(index=rows, columns="dimension", values="mean")
    means = means.to_numpy()
    lengths = np.linalg.norm(means, axis=1, keepdims=True)
    squares = np.square(means / lengths).mean(0)
    correction = 1 + 2 / len(means)
    ratio = correction * squares.sum() ** 2
    ratio /= np.square(squares).sum()
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
    r"""The probability P(|cos| ≥ |c|) that independent directions are as alike, or as opposite.

    (1 + cos) / 2 follows a Beta((d − 1)/2, (d − 1)/2) law, so that it is twice the upper tail at (1
    + |c|) / 2.

    Args:
        cosine: c, of either sign.
        dimensions: d, of the directions.

    >>> chance_of_cosine(np.array([0.0, 0.5, -0.5]), 3)  # uniform: Archimedes' hat box
    array([1. , 0.5, 0.5])
    """
    half = (dimensions - 1) / 2
    quantile = (1 + np.abs(cosine)) / 2
    return 2 * stats.beta.sf(quantile, half, half)


def head_ends(run: Dynamics) -> pd.DataFrame:
    """The end of the mean query and key of each head, and when they are first beyond chance there.

    Returns:
        Columns seed, layer, head, part (:func:`third_of_layers`), cosine (at the last step), ends
        (``similar`` or ``opposite``, beyond :func:`chance_band`, or ``within the band``) and onset:
        the share of the run after which the cosine is first beyond the band on the side where it
        ends; missing where it ends within.
    """
    keys = ["seed", "layer", "head"]
    band = chance_band(chance_dimensions(run))
    table = run["qk_alignment"].sort_values("step", kind="stable")
    table = table.set_index(keys)
    last = table.groupby(keys)["cosine"].last()
    outside = last.abs() > band
    side = np.sign(last).where(outside, 0.0)
    names = {
        1: "similar",
        -1: "opposite",
        0: "within the band",
    }
    heads = pd.DataFrame({"cosine": last, "ends": side.map(names)})
    beyond = table["cosine"] * side.reindex(table.index) > band
    first = table.loc[beyond, "step"].groupby(keys).min()
    heads["onset"] = first / max(run.steps[-1], 1)
    heads = heads.reset_index()
    parts = third_of_layers(heads, run.layers)
    heads.insert(3, "part", parts)
    return heads


def third_of_layers(table: pd.DataFrame, depth: int) -> pd.Series:
    """The third of the layers that each row lies in.

    Of 4 layers, the first and last third have one, the middle two.

    Args:
        table: with a column layer, counted from 1.
        depth: how many layers there are.
    """
    size = max(1, round(depth / 3))
    layer = table["layer"]
    names = np.select(
        [layer <= size, layer > depth - size],
        ["first third", "last third"],
        "middle third",
    )
    return pd.Series(names, table.index)


def cosine_of_layers(run: Dynamics) -> pd.DataFrame:
    """The cosine of mean query and mean key with the heads of a layer concatenated.

    Godey et al. 2024, Fig. 23.

    Returns:
        Columns seed, step, layer and cosine.
    """
    keys = ["seed", "step", "layer"]
    rows = [*keys, "head", "dimension"]
    means = run["head_means"].pivot(index=rows, columns="space", values="mean")
    query = means["query"]
    key = means["key"]
    products = {
        "dot": query * key,
        "query": query**2,
        "key": key**2,
    }
    sums = pd.DataFrame(products).groupby(keys).sum()
    lengths = np.sqrt(sums["query"] * sums["key"])
    cosine = sums["dot"] / lengths
    return cosine.rename("cosine").reset_index()


def agreement_of_seeds(run: Dynamics) -> Estimate:
    """The correlation over steps of the :func:`cosine_of_layers` of two seeds.

    Mean over layers and pairs of seeds, with a jackknife interval over seeds; fewer than five have
    none.
    """
    if len(run.seeds) < 2:
        return Estimate(math.nan)
    cosines = cosine_of_layers(run)
    wide = cosines.pivot(index="step", columns=["seed", "layer"], values="cosine")
    pairs = [*itertools.combinations(run.seeds, 2)]
    correlations = []
    for first, second in pairs:
        of_layers = wide[first].corrwith(wide[second])
        correlations.append(of_layers.mean())
    correlations = np.array(correlations)
    mean = correlations.mean()
    without = []
    if len(run.seeds) >= FEWEST_SEEDS:
        for seed in run.seeds:
            kept = [seed not in pair for pair in pairs]
            without.append(correlations[kept].mean())
    return jackknife(mean, without)
