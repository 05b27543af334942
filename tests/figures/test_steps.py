"""The axis of the steps of a run, and the queries and keys along them, as the page draws them on
planted tables.
"""

from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from planted import run_cells

from analysis_book import figures

STEPS = (0, 10, 1000)
PAGE = "training/queries-and-keys"


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def planted(vectors: int) -> pd.DataFrame:
    """Queries and keys of two heads that move apart step by step, all on one side of the origin."""
    draw = np.random.default_rng(0)
    rows = [
        ("both", head, step, space, *(1 + i * sign + 0.1 * draw.random(2)))
        for head in ("similar", "opposite")
        for i, step in enumerate(STEPS)
        for space, sign in (("query", 1), ("key", 2))
        for _ in range(vectors)
    ]
    return pd.DataFrame(rows, columns=["directions", "head", "step", "space", "x", "y"])


def test_the_page_draws_the_sample_and_its_mean_at_each_step():
    clouds = planted(9)
    paths = clouds.groupby(["directions", "head", "step", "space"])[["x", "y"]].mean().reset_index()
    grid = run_cells(
        PAGE, "def finish", "drawn = clouds", clouds=clouds, paths=paths, some=[0, 1000]
    )["grid"]
    assert sorted(grid.axes_dict) == [
        (0, "opposite"),
        (0, "similar"),
        (1000, "opposite"),
        (1000, "similar"),
    ]
    for (step, head), axes in grid.axes_dict.items():
        part = clouds[(clouds["head"] == head) & (clouds["step"] == step)]
        points, means = axes.collections
        np.testing.assert_allclose(points.get_offsets(), part[["x", "y"]])
        centres = part.groupby("space")[["x", "y"]].mean()
        np.testing.assert_allclose(
            sorted(means.get_offsets().tolist()), sorted(centres.to_numpy().tolist())
        )
        # The origin and the vectors of all steps fit into each panel.
        for direction, (low, high) in (("x", axes.get_xlim()), ("y", axes.get_ylim())):
            assert low <= 0
            assert high > clouds.loc[clouds["head"] == head, direction].max()
        assert axes.get_aspect() == 1
    assert [text.get_text() for text in grid.legend.get_texts()] == ["query", "key"]


def test_the_page_draws_the_path_of_the_means_and_where_it_ends():
    paths = planted(1)
    grid = run_cells(PAGE, "def finish", "paths.query(\"directions == 'both'\"),", paths=paths)[
        "grid"
    ]
    for head, axes in grid.axes_dict.items():
        path = paths[paths["head"] == head].set_index("space")[["x", "y"]]
        lines = [line.get_xydata() for line in axes.lines if len(line.get_xydata()) == len(STEPS)]
        for line, space in zip(lines, ("query", "key"), strict=True):
            np.testing.assert_allclose(line, path.loc[space])
        ends = path.groupby("space").tail(1).to_numpy().tolist()
        np.testing.assert_allclose(
            sorted(axes.collections[-1].get_offsets().tolist()), sorted(ends)
        )
        for (low, high), direction in ((axes.get_xlim(), "x"), (axes.get_ylim(), "y")):
            assert low < path[direction].min()
            assert high > path[direction].max()


def test_the_frames_of_the_slider_have_one_scale_with_all_vectors():
    clouds = planted(9)
    names = {
        "clouds": clouds,
        "shown": SimpleNamespace(steps=[0, 1, 2, 3, 1000]),
        "display": lambda _: None,
    }
    frames = run_cells(PAGE, "def finish", "cloud, frames", **names)["frames"]
    assert [*frames] == ["0", "1,000"]
    panels = [figure.axes for figure in frames.values()]
    for head, pair in zip(("similar", "opposite"), zip(*panels, strict=True), strict=True):
        cloud = clouds[clouds["head"] == head]
        for direction in ("x", "y"):
            (low, high), other = (getattr(axes, f"get_{direction}lim")() for axes in pair)
            assert (low, high) == other
            assert low <= cloud[direction].min()
            assert high >= cloud[direction].max()


@pytest.mark.parametrize(
    ("ends", "expected"),
    [((7, 16), {"7", "10", "15"}), ((2, 3000), {"3", "10", "30", "100", "300", "1000", "3000"})],
)
def test_a_logarithmic_axis_has_several_numbers_however_short_it_is(ends, expected):
    _, axes = plt.subplots()
    axes.plot(ends)
    figures.log_axis(axes)
    low, high = axes.get_ylim()
    assert {f"{tick:g}" for tick in axes.get_yticks() if low <= tick <= high} == expected


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ((0, 1, 4), ["0", "1", "4"]),
        ((0, 8, 16, 80, 800), ["0", "8", "80", "800"]),
        ((0, 20_000, 200_000, 2_000_000), ["0", "20k", "200k", "2M"]),
        ((0,), ["0", "1"]),
    ],
)
def test_steps_have_readable_ticks(steps, expected):
    _, axes = plt.subplots()
    figures.step_axis(axes, steps)
    assert [label.get_text() for label in axes.get_xticklabels()] == expected
