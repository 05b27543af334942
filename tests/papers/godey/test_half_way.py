"""Which quantity changes first, and what changes together: on planted runs."""

import math

import pandas as pd
import pytest
from planted_run import LAYERS, STEPS, planted, thirds_apart

from analysis_book.papers.godey import half_way


def test_the_quantities_are_those_of_the_attention_layers():
    run = planted(thirds_apart, anisotropy=lambda layer, way: 0.1 * layer + 0.3 * way, seeds=(0, 1))
    quantities = half_way.quantities(run).set_index(["seed", "step", "layer", "quantity"])["value"]
    assert len(quantities) == 2 * len(STEPS) * LAYERS * 3
    hidden = (
        run["anisotropy"].query("space == 'hidden'").set_index(["seed", "step", "layer"])["cosine"]
    )
    for (seed, step, layer, quantity), value in quantities.items():
        here = f"seed == {seed} and step == {step} and layer == {layer}"
        aligned = run["qk_alignment"].query(here)["cosine"].abs().mean()
        entropy = run["attention_entropy"].query(here)["entropy_normalised"].mean()
        expected = {
            "anisotropy": hidden[seed, step, layer - 1],
            "alignment": aligned,
            "sharpness": 1 - entropy,
        }
        assert value == pytest.approx(expected[quantity], abs=1e-12)


@pytest.mark.parametrize(
    ("steps", "values", "farthest", "to_farthest", "to_end"),
    [
        ([0, 10, 20], [0.0, 0.5, 1.0], 1.0, 10, 10),
        ([0, 10, 20], [1.0, 0.9, 0.0], 0.0, 20, 20),
        # What happens between two checkpoints is not known.
        ([0, 100], [0.2, 0.4], 0.4, 100, 100),
        # An overshoot is half of the way to the farthest value, and not to the end.
        ([0, 10, 20, 30], [0.0, 1.0, 0.1, 0.4], 1.0, 10, 30),
        ([0, 10, 20, 30], [0.0, 1.0, 0.3, 0.4], 1.0, 10, 10),
        ([0, 10, 20, 30], [0.0, 1.0, 0.2, -0.4], 1.0, 10, 30),
        # It goes the other way first, and that is not half of the way.
        ([0, 10, 20, 30], [0.0, -0.6, 0.0, 1.0], 1.0, 30, 30),
        ([0, 10, 20], [0.3, 0.3, 0.3], 0.3, math.nan, math.nan),
        ([40], [0.3], 0.3, math.nan, math.nan),
    ],
)
def test_half_of_the_way(steps, values, farthest, to_farthest, to_end):
    axis = pd.DataFrame({"seed": 0, "layer": 1, "quantity": "q", "step": steps, "value": values})
    for rows in (axis, axis[::-1]):
        (row,) = half_way.half_way(rows).itertuples()
        assert (row.seed, row.layer, row.quantity, row.start, row.farthest) == (
            0,
            1,
            "q",
            values[0],
            farthest,
        )
        assert row.step == pytest.approx(to_farthest, nan_ok=True)
        assert row.step_to_end == pytest.approx(to_end, nan_ok=True)
        assert row.end == values[-1]


def test_which_is_first_counts_the_layers_in_which_both_rise():
    """Anisotropy is half-way at step 100 in layers 1 to 4, falls in layer 5 and stays in layer 6;
    attention is sharp at 300 in layer 1, at 600 in layer 2 and at 1,000 in the others.
    """
    powers = {1: 0.5, 2: 1.0}
    run = planted(
        anisotropy=lambda layer, way: {5: 0.5 - way, 6: 0.5}.get(layer, float(way > 0)),
        entropy=lambda layer, way: 3 - way ** powers.get(layer, 2.0),
        seeds=(0, 1),
        steps=(0, 100, 300, 600, 1000),
    )
    first = half_way.earlier(run, "anisotropy", "sharpness")
    assert first.groupby("seed").agg(list).to_dict() == {0: 4 * [True], 1: 4 * [True]}
    # Alignment is half-way at step 600: later than attention in layer 1, and with it in layer 2.
    for way in ("farthest", "end"):
        aligned = half_way.earlier(run, "alignment", "sharpness", way)
        assert aligned.groupby("seed").agg(list)[1] == [False, False, *4 * [True]]
    still = planted(anisotropy=lambda layer, way: 0.5)
    assert half_way.earlier(still, "anisotropy", "sharpness").empty


def test_what_changes_in_each_head_from_the_first_step_to_the_last():
    run = planted(thirds_apart, anisotropy=lambda layer, way: 0.2 + 0.1 * layer * way, seeds=(0, 1))
    changes = half_way.changes(run)
    assert len(changes) == 2 * LAYERS * 3
    # The scalar products start at zero and end at twice the cosine; attention layer l reads hidden
    # layer l - 1.
    first = changes.query("seed == 1 and layer == 2 and head == 3").iloc[0]
    assert first[["growth", "fall", "rise"]].tolist() == pytest.approx([2 * 0.84, 1, 0.2])
    assert first["nats"] == pytest.approx(2 + 0.2 + 0.03)
    assert first["part"] == "first third"
