"""Anisotropy, alignment and sharpness along training, and when each has made half of its way."""

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float

from analysis_book.papers.godey.alignment import third_of_layers
from analysis_book.training.dynamics import Dynamics
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
    """The checkpoint at which each of the :func:`quantities` has made half of its way.

    What happens between two checkpoints is not known: a quantity is half-way at the first one at
    which it has made half of its way or more.

    Returns:
        Columns quantity, seed, layer; start, farthest and end, its values at the first step, at the
        step that differs most from the first, and at the last; step, the first checkpoint with half
        of the way to the farthest value; and step_to_end, the first from which on half of the way
        to the end is behind it, so that an overshoot alone is none. Both are missing where there is
        no way.
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
        there = _is_beyond_half(moved, farthest - start)
        # From the last checkpoint backwards, up to the first that is not there.
        to_stay = np.logical_and.accumulate(_is_beyond_half(moved, end - start)[::-1])[::-1]
        rows.append((*labels, start, farthest, end, _first(steps, there), _first(steps, to_stay)))
    columns = [*keys, "start", "farthest", "end", "step", "step_to_end"]
    return pd.DataFrame(rows, columns=columns)


def earlier(
    run: Dynamics,
    first: str,
    second: str,
    way: str = "farthest",
) -> pd.Series:
    """Whether one of the :func:`quantities` is half-way at an earlier checkpoint, layer by layer.

    Args:
        run: its measurements.
        first, second: the quantities; true is the first one. Two that are half-way at the same
            checkpoint have no order.
        way: half of the way to their ``farthest`` value, or to their ``end``.

    Returns:
        By seed, for each layer in which both rise.
    """
    table = half_way(quantities(run))
    table = table.pivot(index=["seed", "layer"], columns="quantity")
    above_start = table[way] > table["start"]
    both_rise = above_start[[first, second]].all(axis=1)
    column = "step" if way == "farthest" else "step_to_end"
    steps = table[column][both_rise]
    return (steps[first] < steps[second]).droplevel("layer")


def _is_beyond_half(
    moved: Float[np.ndarray, " point"],
    way: float,
) -> Bool[np.ndarray, " point"]:
    """Whether half of a way has been made, at each point."""
    if not way:
        return np.zeros(len(moved), dtype=bool)
    return moved / way >= 0.5


def _first(
    steps: Float[np.ndarray, " point"],
    there: Bool[np.ndarray, " point"],
) -> float:
    """The first step that is there; NaN without one."""
    return float(steps[there.argmax()]) if there.any() else np.nan
