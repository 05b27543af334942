"""The norm of the bias at which the inputs and the outputs of an untrained block are equally long."""

import math
from collections.abc import Iterable
from functools import partial

import pandas as pd
import torch
from scipy import optimize

from analysis_lib.errors import AnalysisError
from analysis_lib.papers.godey.untrained_block import Block, Draw


def excess_norm(block: Block, norm: float) -> float:
    """The mean norm of the outputs minus that of the inputs, E‖T(x + b)‖ − E‖x + b‖, at a bias of this norm."""
    excess = torch.tensor(0.0, dtype=torch.float64)
    for hidden in block.biased(norm):
        excess += (block(hidden).double().norm(dim=-1) - hidden.double().norm(dim=-1)).sum()
    return float(excess) / block.inputs[..., 0].numel()


def fixed_points(blocks: Iterable[Draw], highest: float) -> pd.DataFrame:
    """The norm N* of the bias at which inputs and outputs are equally long on average (Godey et al. 2024, sec. 4.2).

    E‖x + b‖ = E‖T(x + b)‖ is solved on the block itself by Brent's method, between 0 and ``highest``, to five digits.

    Args:
        blocks: the draws.
        highest: the norm of the bias at which the search ends.

    Returns:
        One row per draw. Columns architecture, weights_seed, direction_seed; fixed_point, NaN where the difference has
        the same sign at both ends; excess and excess_at_highest, the mean norm of outputs minus that of inputs, without
        bias and with the largest.

    Raises:
        AnalysisError: ``highest`` is not a positive number.
    """
    if not (math.isfinite(highest) and highest > 0):
        raise AnalysisError(f"a search for a fixed point cannot end at a norm of {highest}: give a positive number")
    rows = []
    for draw in blocks:
        block = draw.block()
        excess = partial(excess_norm, block)
        start, end = excess(0.0), excess(highest)
        root = optimize.brentq(excess, 0.0, highest, xtol=1e-6 * highest, rtol=1e-6) if start * end < 0 else math.nan
        rows.append({**draw.labels, "fixed_point": root, "excess": start, "excess_at_highest": end})
    return pd.DataFrame(rows)
