"""Anisotropy, alignment and sharpness along training, and when each has made half of its way."""

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
    # Attention layer l reads hidden layer l − 1; none reads the last.
    hidden = run["anisotropy"].query("space == 'hidden'")
    read = hidden.assign(layer=hidden["layer"] + 1)
    read = read.query(f"layer <= {run.layers}")
    alignment = run["qk_alignment"]
    entropy = run["attention_entropy"]
    values = {
        "anisotropy": read.assign(value=read["cosine"]),
        "alignment": alignment.assign(value=alignment["cosine"].abs()),
        "sharpness": entropy.assign(value=1 - entropy["entropy_normalised"]),
    }
    means = {}
    for quantity, table in values.items():
        groups = table.groupby(["seed", "step", "layer"], as_index=False)
        means[quantity] = groups["value"].mean()
    return grouped(means, "quantity")


def changes(run: Dynamics) -> pd.DataFrame:
    """The changes in each head from the first step of a run to the last.

    Returns:
        Columns seed, layer, head, part (third of the layers), growth (of the magnitude of the
        scalar product of mean query and mean key), nats (the mean entropy of its attention at the
        last step), fall (of that entropy) and rise (of the average cosine of the hidden states that
        the layer reads, the same for all heads of a layer).
    """
    keys = ["seed", "layer", "head"]
    first = run.steps[0]
    last = run.steps[-1]

    def of_heads(table: str, column: str, step: int) -> pd.Series:
        return run[table].query("step == @step").set_index(keys)[column]

    before = of_heads("attention_entropy", "entropy_nats", first)
    after = of_heads("attention_entropy", "entropy_nats", last)
    start = of_heads("qk_alignment", "dot", first).abs()
    end = of_heads("qk_alignment", "dot", last).abs()
    columns = {"growth": end - start, "nats": after, "fall": before - after}
    table = pd.DataFrame(columns).reset_index()
    table.insert(3, "part", third_of_layers(table, run.layers))
    anisotropy = quantities(run).query("quantity == 'anisotropy'")
    anisotropy = anisotropy.pivot(index=["seed", "layer"], columns="step", values="value")
    rise = anisotropy[last] - anisotropy[first]
    return table.merge(rise.rename("rise").reset_index(), on=["seed", "layer"])


def half_way(quantities: pd.DataFrame) -> pd.DataFrame:
    """When each of the :func:`quantities` has first made half of its way from the start of a run.

    Returns:
        Columns quantity, seed, layer; start, farthest and end, its values at the first step, at the
        step that differs most from the first, and at the last; step and step_to_farthest, at which
        half of the way to the end, and to the farthest value, is made: linear between checkpoints,
        and missing where there is no way.
    """
    keys = ["quantity", "seed", "layer"]
    rows = []
    for labels, group in quantities.sort_values("step").groupby(keys, sort=False):
        steps = group["step"].to_numpy(float)
        values = group["value"].to_numpy()
        start = values[0]
        end = values[-1]
        moved = values - start
        farthest = values[np.abs(moved).argmax()]
        to_end = _crossing(steps, moved, end - start)
        to_farthest = _crossing(steps, moved, farthest - start)
        rows.append((*labels, start, farthest, end, to_end, to_farthest))
    columns = [*keys, "start", "farthest", "end", "step", "step_to_farthest"]
    return pd.DataFrame(rows, columns=columns)


def earlier(
    run: Dynamics,
    first: str,
    second: str,
    way: str = "end",
) -> pd.Series:
    """The share of the layers in which one of the :func:`quantities` is half-way first, by seed.

    Args:
        run: its measurements.
        first, second: the quantities; the share is that of the layers with the first one earlier.
        way: half of the way to their ``end``, or to their ``farthest`` value; only layers in which
            both rise count.
    """
    table = half_way(quantities(run))
    table = table.pivot(index=["seed", "layer"], columns="quantity")
    above_start = table[way] > table["start"]
    both_rise = above_start[[first, second]].all(axis=1)
    column = "step" if way == "end" else "step_to_farthest"
    steps = table[column][both_rise]
    first_is_earlier = steps[first] < steps[second]
    return first_is_earlier.groupby("seed").mean()


def _crossing(
    steps: Float[np.ndarray, " point"],
    moved: Float[np.ndarray, " point"],
    way: float,
) -> float:
    """The first step at which half of the way is made, on straight lines between the points."""
    if not way:
        return np.nan
    share = moved / way
    after = int(np.argmax(share >= 0.5))
    if not after:
        return np.nan
    around = slice(after - 1, after + 1)
    return float(np.interp(0.5, share[around], steps[around]))
