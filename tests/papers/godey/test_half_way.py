"""Which quantity changes first: on planted runs."""

import math

import pandas as pd
import pytest
from planted import run_cells
from planted_run import LAYERS, STEPS, planted, thirds_apart

from analysis_lib.papers.godey.dynamics import Dynamics

QUANTITIES = ("anisotropy of the layer's input", "alignment of queries and keys", "sharpness of attention")


def on_page(run: Dynamics) -> dict:
    """What the page finds of a run."""
    return run_cells("training/alignment", "quantities = {}", "halves = ", "order = ", runs={"planted": run})


def test_the_quantities_are_those_of_the_attention_layers():
    run = planted(thirds_apart, anisotropy=lambda layer, way: 0.1 * layer + 0.3 * way, seeds=(0, 1))
    quantities = on_page(run)["quantities"]["planted"].set_index(["seed", "step", "layer", "quantity"])["value"]
    assert len(quantities) == 2 * len(STEPS) * LAYERS * 3
    hidden = run["anisotropy"].query("space == 'hidden'").set_index(["seed", "step", "layer"])["cosine"]
    for (seed, step, layer, quantity), value in quantities.items():
        here = f"seed == {seed} and step == {step} and layer == {layer}"
        aligned = run["qk_alignment"].query(here)["cosine"].abs().mean()
        entropy = run["attention_entropy"].query(here)["entropy_normalised"].mean()
        expected = dict(zip(QUANTITIES, (hidden[seed, step, layer - 1], aligned, 1 - entropy), strict=True))[quantity]
        assert value == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("steps", "values", "farthest", "half"),
    [
        ([0, 10, 20], [0.0, 0.5, 1.0], 1.0, 10),
        ([0, 10, 20], [1.0, 0.9, 0.0], 0.0, 10 + 10 * 4 / 9),
        ([0, 100], [0.2, 0.4], 0.4, 50),
        ([0, 10, 20, 30], [0.0, 1.0, 0.2, 0.4], 1.0, 5),
        # It goes the other way first, and that is not half of the way.
        ([0, 10, 20, 30], [0.0, -0.6, 0.0, 1.0], 1.0, 25),
        ([0, 10, 20], [0.3, 0.3, 0.3], 0.3, math.nan),
        ([40], [0.3], 0.3, math.nan),
        ([10, 20], [0.0, 1.0], 1.0, 15),
    ],
)
def test_half_of_the_way(steps, values, farthest, half):
    axis = pd.DataFrame({"seed": 0, "layer": 1, "quantity": "q", "step": steps, "value": values})
    for rows in (axis, axis[::-1]):
        (row,) = run_cells("training/alignment", "halves = ", quantities={"run": rows})["halves"].itertuples(
            index=False
        )
        assert (row.seed, row.layer, row.quantity, row.start, row.farthest) == (0, 1, "q", values[0], farthest)
        assert row.step == pytest.approx(half, nan_ok=True)
        assert row.end == values[-1]


def test_the_way_to_the_end_ignores_a_spike():
    axis = pd.DataFrame(
        {"seed": 0, "layer": 1, "quantity": "q", "step": [0, 10, 20, 30], "value": [0.0, 1.0, 0.2, -0.4]}
    )
    (row,) = run_cells("training/alignment", "halves = ", quantities={"run": axis})["halves"].itertuples()
    assert (row.step, row.step_to_end) == (5, pytest.approx(20 + 10 * 0.4 / 0.6))


def test_which_is_first_counts_the_layers_in_which_the_first_is_earlier():
    """Anisotropy is half-way at step 5 in layers 1 to 4, and does not change in layers 5 and 6."""
    found = planted(
        anisotropy=lambda layer, way: 0.5 if layer > 4 else float(way > 0),
        entropy=lambda layer, way: 3 - (way**2 if layer > 1 else way**0.5),
    )
    table = on_page(found)["order"].query("way_to == 'farthest point'").set_index(["first", "second"])
    row = table.loc[QUANTITIES[0], QUANTITIES[2]]
    assert (row["layers"], row["share"]) == (4, 1.0)
    assert (row["first_step"], row["second_step"]) == pytest.approx((5, 100 + 900 * 0.49 / 0.99))
    # One training has no interval, however many layers agree.
    assert math.isnan(row["ci_low"])
    # Only in layer 1 is attention sharp before queries and keys align.
    assert table.loc[(QUANTITIES[1], QUANTITIES[2]), ["share", "layers"]].tolist() == [pytest.approx(5 / 6), 6]
    still = on_page(planted(anisotropy=lambda layer, way: 0.5))["order"]
    assert still.loc[0, "layers"] == 0
    assert math.isnan(still.loc[0, "share"])
