"""Godey et al. (2024), section 5: queries, keys and attention along training."""

import itertools
import math

import numpy as np
import pandas as pd
from scipy import stats

from analysis_lib.metrics.intervals import seed_interval, wilson
from analysis_lib.papers.godey.dynamics import Dynamics, chance_band, cosine_of_layers, drift_along, heads_shown, thirds
from analysis_lib.papers.old_claims import Estimate, EstimatedClaim, estimated

GODEY = "Godey et al. 2024"

# Layers that the figures of section 5 and appendix D show, of the 12 of a MultiBERT, here counted from 1.
_SHOWN_LAYERS = {13: (1, 5, 10, 12), 23: (1, 3, 7, 12)}


def layers_of_figure(figure: int, depth: int) -> list[int]:
    """The attention layers of Figure 13 or 23, and those as deep in a model of another depth.

    >>> layers_of_figure(13, 12), layers_of_figure(23, 6)
    ([1, 5, 10, 12], [1, 2, 4, 6])
    """
    return sorted({1 + round((layer - 1) / 11 * (depth - 1)) for layer in _SHOWN_LAYERS[figure]})


# Steps, sequences of a batch and tokens of a sequence (Sellam et al. 2022, sec. 2).
MULTIBERTS_TOKENS = 2_000_000 * 256 * 512


def _share(held: pd.Series) -> Estimate:
    """The share of what is true, with Wilson's interval; missing where there is nothing."""
    if held.empty:
        return (math.nan,) * 3
    return float(held.mean()), *wilson(int(held.sum()), len(held))


def _mean_difference(greater: pd.Series, less: pd.Series) -> Estimate:
    """The difference of two means, with Welch's interval; missing where one of them has a single value."""
    value = float(greater.mean() - less.mean())
    if min(len(greater), len(less)) < 2:
        return value, math.nan, math.nan
    interval = stats.ttest_ind(greater, less, equal_var=False).confidence_interval(0.95)
    return value, float(interval.low), float(interval.high)


def _seeds_agree(found: Dynamics) -> Estimate:
    """The mean over layers of the correlation, over steps, of the cosines of two seeds; its interval is Student's."""
    wide = cosine_of_layers(found).pivot(index="step", columns=["seed", "layer"], values="cosine")
    pairs = itertools.combinations(found.seeds, 2)
    by_layer = pd.DataFrame([wide[one].corrwith(wide[other]) for one, other in pairs])
    value, *ends = seed_interval(by_layer.mean().dropna())
    return value, *np.clip(ends, -1.0, 1.0)


def godey_training_verdicts(found: Dynamics) -> pd.DataFrame:
    """The verdicts on the claims of section 5 and appendix D on a run of training.

    The sample is the heads, or the layers, of all seeds. Shares have Wilson's interval, means Student's, and the
    difference of two means Welch's. A run of one seed says nothing about appendix D, and has no row for it.

    Returns:
        The columns of ``verdicts``.
    """
    ends = found["qk_alignment"].assign(part=lambda table: thirds(table, found))
    keys, (start, end) = ["seed", "layer", "head"], (found.steps[0], found.steps[-1])
    last = ends[ends["step"] == end]
    cosine = {part: group["cosine"] for part, group in last.groupby("part")}
    dots = ends.pivot(index=keys, columns="step", values="dot").abs()
    entropy = found["attention_entropy"].assign(part=lambda table: thirds(table, found))
    by_layer = entropy.groupby(["seed", "layer", "step"])["entropy_nats"].mean().unstack()
    sharp = {part: group["entropy_nats"] for part, group in entropy[entropy["step"] == end].groupby("part")}
    first_third, last_third, section = cosine["first third"], cosine["last third"], "sec. 5"
    band = chance_band(found.head_width)
    claims: list[EstimatedClaim] = [
        (
            section,
            "Mean query and mean key align in almost all heads, in a common direction or in opposite ones.",
            "share of all heads with |cos| outside of the 99 % band at the last step",
            0.9,
            _share(last["cosine"].abs() > band),
        ),
        (
            section,
            "In the first layers, mean queries and mean keys align more than chance would have it.",
            "share of the heads of the first third of the layers with |cos| outside of the 99 % band at the last step",
            0.5,
            _share(first_third.abs() > band),
        ),
        (
            section,
            "In the first layers, mean queries and mean keys drift in a common direction.",
            "mean cosine over the heads of the first third of the layers at the last step",
            0.0,
            seed_interval(first_third),
        ),
        (
            section,
            "In the last layers, mean queries and mean keys drift in opposite directions.",
            "minus the mean cosine over the heads of the last third of the layers at the last step",
            0.0,
            seed_interval(-last_third),
        ),
        (
            section,
            "The scalar product of mean query and mean key grows in magnitude.",
            "share of heads in which it is greater at the last step than at the first",
            0.5,
            _share(dots[end] > dots[start]),
        ),
        (
            section,
            "Attention becomes sharper along training, in all layers.",
            "share of layers with a lower mean entropy at the last step than at the first",
            0.5,
            _share(by_layer[end] < by_layer[start]),
        ),
        (
            section,
            "The first layers end sharper than the last ones.",
            "mean entropy of the heads of the last third of the layers minus that of the first, in nats, last step",
            0.0,
            _mean_difference(sharp["last third"], sharp["first third"]),
        ),
    ]
    if len(found.seeds) > 1:
        claims.append(
            (
                "app. D",
                "The alignment of a layer follows similar trends in all seeds.",
                "correlation over steps of the cosines of two seeds, heads concatenated, mean over layers and pairs",
                0.0,
                _seeds_agree(found),
            )
        )
    return estimated(claims, GODEY)


def godey_direction_verdicts(found: Dynamics) -> pd.DataFrame:
    """The verdicts on the claims of section 5 and appendix C on the directions of queries and keys.

    They are about the two heads that are shown, and have no interval: the number decides alone.

    Returns:
        The columns of ``verdicts``.
    """
    drift = pd.concat([drift_along(found, shown) for shown in heads_shown(found["qk_alignment"])])
    drift = drift.groupby("of")[["query_share", "key_share"]].min()
    # A share is the square of a cosine: a direction that has nothing to do with the drift holds less, 99 times of 100.
    chance = chance_band(found.head_width) ** 2
    alone = {
        "sec. 5": (
            "The first direction of queries and keys describes the drift that they have in common.",
            "share of the squared move of the mean, from the first step to the last, along the first direction: the "
            "least of query and key in the two heads shown",
            0.5,
            drift.loc["both"].min(),
        ),
        "app. C": (
            "The first direction of the keys alone is relevant to the drift of the queries, and the reverse.",
            "share of the squared move of the mean of the one along the first direction of the other: the least of "
            "both in the two heads shown",
            chance,
            min(drift.loc["key", "query_share"], drift.loc["query", "key_share"]),
        ),
    }
    table = estimated([(source, *told, (value,) * 3) for source, (*told, value) in alone.items()], GODEY)
    return table.assign(ci_low=math.nan, ci_high=math.nan)
