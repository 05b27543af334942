"""The numbers that decide claims on a run of training (Godey et al. 2024, sec. 5 and app. D), with their intervals.

Intervals are over heads, or over layers, of all seeds. The first third of the layers stands for the first ones, and the
last third for the last ones.
"""

import itertools
import math

import pandas as pd
from scipy import stats

from analysis_lib.metrics.intervals import seed_interval, wilson
from analysis_lib.papers.claims import Estimate
from analysis_lib.papers.godey.alignment import chance_band, cosine_of_layers, third_of_layers
from analysis_lib.papers.godey.dynamics import Dynamics

# Steps, sequences per batch and tokens per sequence (Sellam et al. 2022, sec. 2).
MULTIBERTS_TOKENS = 2_000_000 * 256 * 512


def _share(true: pd.Series) -> Estimate:
    """The share that is true, with Wilson's interval; missing where there is nothing."""
    if true.empty:
        return (math.nan,) * 3
    return float(true.mean()), *wilson(int(true.sum()), len(true))


def _at_the_end(run: Dynamics, name: str, column: str, part: str | None = None) -> pd.Series:
    """A column at the last step, of all layers or of one third of them."""
    table = run[name][run[name]["step"] == run.steps[-1]]
    return table.loc[slice(None) if part is None else third_of_layers(table, run.layers) == part, column]


def aligned_share(run: Dynamics, part: str | None = None) -> Estimate:
    """The share of heads whose cosine of mean query and mean key ends outside the 99 % band; Wilson's interval.

    Args:
        run: its measurements.
        part: ``first third``, ``middle third`` or ``last third`` of the layers; all of them by default.
    """
    return _share(_at_the_end(run, "qk_alignment", "cosine", part).abs() > chance_band(run.head_width))


def common_drift(run: Dynamics, part: str) -> Estimate:
    """The mean cosine of mean query and mean key over the heads of a third at the last step; Student's interval."""
    return seed_interval(_at_the_end(run, "qk_alignment", "cosine", part))


def opposite_drift(run: Dynamics, part: str) -> Estimate:
    """Minus the mean cosine of :func:`common_drift`."""
    return seed_interval(-_at_the_end(run, "qk_alignment", "cosine", part))


def _first_and_last(run: Dynamics, values: pd.Series) -> tuple[pd.Series, pd.Series]:
    by_step = values.unstack("step")
    return by_step[run.steps[0]], by_step[run.steps[-1]]


def share_of_growing_products(run: Dynamics) -> Estimate:
    """The share of heads whose |scalar product| of mean query and key is greater at the end than at the start.

    Its interval is Wilson's.
    """
    start, end = _first_and_last(run, run["qk_alignment"].set_index(["seed", "layer", "head", "step"])["dot"].abs())
    return _share(end > start)


def share_of_sharpened_layers(run: Dynamics) -> Estimate:
    """The share of layers whose mean attention entropy is lower at the end than at the start; Wilson's interval."""
    means = run["attention_entropy"].groupby(["seed", "layer", "step"])["entropy_nats"].mean()
    start, end = _first_and_last(run, means)
    return _share(end < start)


def entropy_gap(run: Dynamics) -> Estimate:
    """The mean entropy of the heads of the last third minus that of the first third, in nats, at the last step.

    Its interval is Welch's; it is missing where one of them has a single head.
    """
    last, first = (_at_the_end(run, "attention_entropy", "entropy_nats", f"{part} third") for part in ("last", "first"))
    value = float(last.mean() - first.mean())
    if min(len(last), len(first)) < 2:
        return value, math.nan, math.nan
    interval = stats.ttest_ind(last, first, equal_var=False).confidence_interval(0.95)
    return value, float(interval.low), float(interval.high)


def agreement_of_seeds(run: Dynamics) -> Estimate:
    """The correlation over steps of the cosines of two seeds, with the heads of a layer concatenated.

    Mean over the pairs of seeds of a layer, then over layers, with Student's interval over layers.
    """
    wide = cosine_of_layers(run).pivot(index="step", columns=["seed", "layer"], values="cosine")
    pairs = itertools.combinations(run.seeds, 2)
    by_layer = pd.DataFrame([wide[one].corrwith(wide[other]) for one, other in pairs])
    return seed_interval(by_layer.mean().dropna())
