"""The clouds of queries and keys and the paths of their means, as drawn, on planted tables."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from analysis_lib import figures
from analysis_lib.errors import AnalysisError

STEPS = (0, 10, 1000)


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def planted(vectors: int) -> pd.DataFrame:
    """Queries and keys of two heads that move apart step by step, all on one side of the origin."""
    draw = np.random.default_rng(0)
    rows = [
        (head, step, space, *(1 + i * sign + 0.1 * draw.random(2)))
        for head in ("similar", "opposite")
        for i, step in enumerate(STEPS)
        for space, sign in (("query", 1), ("key", 2))
        for _ in range(vectors)
    ]
    return pd.DataFrame(rows, columns=["head", "step", "space", "x", "y"])


def titles(figure) -> list[str]:
    return [axes.get_title() for axes in figure.axes]


def test_clouds_draw_the_sample_and_its_mean_on_the_axes_of_all_steps():
    clouds = planted(9)
    figure = figures.query_key_clouds(clouds, [0, 1000])
    assert titles(figure) == ["similar", "opposite", "", ""]
    for axes, (step, head) in zip(figure.axes, [(s, h) for s in (0, 1000) for h in titles(figure)[:2]], strict=True):
        cloud = clouds[clouds["head"] == head]
        points, means = axes.collections
        part = cloud[cloud["step"] == step]
        np.testing.assert_allclose(points.get_offsets(), part[["x", "y"]])
        np.testing.assert_allclose(means.get_offsets(), part.groupby("space")[["x", "y"]].mean())
        # The origin and the vectors of all steps fit into each panel.
        for direction, (low, high) in (("x", axes.get_xlim()), ("y", axes.get_ylim())):
            assert low < 0
            assert high > cloud[direction].max()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["query", "key"]
    with pytest.raises(AnalysisError, match="no step 7: give some of 0, 10, 1000"):
        figures.query_key_clouds(clouds, [7])


def test_paths_draw_an_arrow_from_each_checkpoint_to_the_next():
    paths = planted(1)
    figure = figures.mean_paths(paths)
    assert titles(figure) == ["similar", "opposite"]
    for axes in figure.axes:
        path = paths[paths["head"] == axes.get_title()]
        for arrows, space in zip(axes.collections, ("query", "key"), strict=True):
            points = path.loc[path["space"] == space, ["x", "y"]].to_numpy()
            np.testing.assert_allclose(arrows.XY, points[:-1])
            np.testing.assert_allclose(arrows.XY + np.stack([arrows.U, arrows.V], 1), points[1:])
        for (low, high), direction in ((axes.get_xlim(), "x"), (axes.get_ylim(), "y")):
            assert low < path[direction].min()
            assert high > path[direction].max()


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
