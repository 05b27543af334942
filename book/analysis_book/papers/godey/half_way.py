"""Anisotropy, alignment and sharpness of each layer along training, and when each has made half of
its way.
"""

import numpy as np
import pandas as pd
from jaxtyping import Float

from analysis_book.papers.godey.alignment import third_of_layers
from analysis_book.papers.godey.dynamics import Dynamics
from analysis_lib.measurement import grouped


def quantities(run: Dynamics) -> pd.DataFrame:
    """Three numbers of each attention layer at each checkpoint.

    Returns:
        Columns quantity, seed, step, layer and value. A quantity is ``anisotropy``, the average
        cosine of the hidden states that the layer reads; ``alignment``, the mean over heads of
        ǀcosǀ of mean query and mean key; or ``sharpness``, one minus the normalised entropy of
        attention, mean over heads.
    """
    hidden = run["anisotropy"].query("space == 'hidden'")
    # Attention layer l reads hidden layer l − 1; none reads the last.
    read = hidden.assign(layer=hidden["layer"] + 1).query(f"layer <= {run.layers}")
    values = {
        "anisotropy": read.assign(value=read["cosine"]),
        "alignment": run["qk_alignment"].assign(value=lambda table: table["cosine"].abs()),
        "sharpness": run["attention_entropy"].assign(
            value=lambda table: 1 - table["entropy_normalised"]
        ),
    }
    place = ["seed", "step", "layer"]
    means = {
        name: table.groupby(place, as_index=False)["value"].mean() for name, table in values.items()
    }
    return grouped(means, "quantity")


def changes(run: Dynamics) -> pd.DataFrame:
    """What changes in each head from the first step of a run to the last.

    Returns:
        Columns seed, layer, head, part (third of the layers), growth (of the magnitude of the
        scalar product of mean query and mean key), nats (the mean entropy of its attention at the
        last step), fall (of that entropy) and rise (of the average cosine of the hidden states that
        the layer reads, the same for all heads of a layer).
    """
    keys, ends = ["seed", "layer", "head"], [run.steps[0], run.steps[-1]]
    start, end = (
        run["qk_alignment"].query("step == @step").set_index(keys)["dot"].abs() for step in ends
    )
    before, after = (
        run["attention_entropy"].query("step == @step").set_index(keys)["entropy_nats"]
        for step in ends
    )
    rise = (
        quantities(run)
        .query("quantity == 'anisotropy'")
        .pivot(index=keys[:2], columns="step", values="value")
    )
    table = pd.DataFrame(
        {"growth": end - start, "nats": after, "fall": before - after}
    ).reset_index()
    table.insert(3, "part", third_of_layers(table, run.layers))
    return table.merge((rise[ends[1]] - rise[ends[0]]).rename("rise").reset_index(), on=keys[:2])


def half_way(quantities: pd.DataFrame) -> pd.DataFrame:
    """When each of the :func:`quantities` has made half of its way from the start of the run for
    the first time.

    Returns:
        Columns quantity, seed, layer; start, farthest and end, its values at the first step, at the
        step that differs most from the first, and at the last; step and step_to_farthest, at which
        half of the way to the end, and to the farthest value, is made: linear between checkpoints,
        and missing where there is no way.
    """
    keys, rows = ["quantity", "seed", "layer"], []
    for place, group in quantities.sort_values("step").groupby(keys, sort=False):
        steps, values = group["step"].to_numpy(float), group["value"].to_numpy()
        farthest = values[np.abs(values - values[0]).argmax()]
        reached = [
            _crossing(steps, values - values[0], goal - values[0])
            for goal in (values[-1], farthest)
        ]
        rows.append((*place, values[0], farthest, values[-1], *reached))
    return pd.DataFrame(
        rows, columns=[*keys, "start", "farthest", "end", "step", "step_to_farthest"]
    )


def earlier(
    run: Dynamics,
    first: str,
    second: str,
    way: str = "end",
) -> pd.Series:
    """By seed, the share of the layers in which one of the :func:`quantities` is half-way before
    another.

    Args:
        run: its measurements.
        first, second: the quantities.
        way: half of the way to their ``end``, or to their ``farthest`` value; only layers in which
            both rise count.
    """
    table = half_way(quantities(run)).pivot(index=["seed", "layer"], columns="quantity")
    rises = (table[way] > table["start"])[[first, second]].all(axis=1)
    steps = table["step" if way == "end" else "step_to_farthest"][rises]
    return (steps[first] < steps[second]).groupby("seed").mean()


def _crossing(
    steps: Float[np.ndarray, " point"],
    moved: Float[np.ndarray, " point"],
    way: float,
) -> float:
    """The first step at which half of the way is made, on straight lines between the points."""
    after = int(np.argmax(moved / way >= 0.5)) if way else 0
    return (
        float(np.interp(0.5, moved[after - 1 : after + 1] / way, steps[after - 1 : after + 1]))
        if after
        else np.nan
    )
