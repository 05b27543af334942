"""Anisotropy, alignment and sharpness of each layer along training, and when each has made half of its way."""

import numpy as np
import pandas as pd
from jaxtyping import Float

from analysis_lib.measurement import grouped
from analysis_lib.papers.godey.dynamics import Dynamics


def quantities(run: Dynamics) -> pd.DataFrame:
    """Three numbers of each attention layer at each checkpoint.

    Returns:
        Columns quantity, seed, step, layer and value. A quantity is ``anisotropy``, the average cosine of the hidden
        states that the layer reads; ``alignment``, the mean over heads of ǀcosǀ of mean query and mean key; or
        ``sharpness``, one minus the normalised entropy of attention, mean over heads.
    """
    hidden = run["anisotropy"].query("space == 'hidden'")
    # Attention layer l reads hidden layer l − 1; none reads the last.
    read = hidden.assign(layer=hidden["layer"] + 1).query(f"layer <= {run.layers}")
    values = {
        "anisotropy": read.assign(value=read["cosine"]),
        "alignment": run["qk_alignment"].assign(value=lambda table: table["cosine"].abs()),
        "sharpness": run["attention_entropy"].assign(value=lambda table: 1 - table["entropy_normalised"]),
    }
    place = ["seed", "step", "layer"]
    means = {name: table.groupby(place, as_index=False)["value"].mean() for name, table in values.items()}
    return grouped(means, "quantity")


def half_way(quantities: pd.DataFrame) -> pd.DataFrame:
    """When each of the :func:`quantities` has made half of its way from the start of the run for the first time.

    Returns:
        Columns quantity, seed, layer; start, farthest and end, its values at the first step, at the step that differs
        most from the first, and at the last; step and step_to_farthest, at which half of the way to the end, and to the
        farthest value, is made: linear between checkpoints, and missing where there is no way.
    """
    keys, rows = ["quantity", "seed", "layer"], []
    for place, group in quantities.sort_values("step").groupby(keys, sort=False):
        steps, values = group["step"].to_numpy(float), group["value"].to_numpy()
        farthest = values[np.abs(values - values[0]).argmax()]
        reached = [_crossing(steps, values - values[0], goal - values[0]) for goal in (values[-1], farthest)]
        rows.append((*place, values[0], farthest, values[-1], *reached))
    return pd.DataFrame(rows, columns=[*keys, "start", "farthest", "end", "step", "step_to_farthest"])


def _crossing(steps: Float[np.ndarray, " point"], moved: Float[np.ndarray, " point"], way: float) -> float:
    """The first step at which half of the way is made, on straight lines between the points."""
    after = int(np.argmax(moved / way >= 0.5)) if way else 0
    return float(np.interp(0.5, moved[after - 1 : after + 1] / way, steps[after - 1 : after + 1])) if after else np.nan
