"""How far mean queries and keys align, on planted runs and against random directions."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from planted import run_cells
from planted_run import HEADS, LAYERS, STEPS, WIDTH, planted, thirds_apart

from analysis_book.papers.godey import alignment
from analysis_book.training.dynamics import Dynamics


@pytest.mark.parametrize("width", [2, 16, 64])
def test_the_band_of_chance_is_that_of_random_directions(width):
    pairs = np.random.default_rng(0).normal(size=(2, 40_000, width))
    units = pairs / np.linalg.norm(pairs, axis=-1, keepdims=True)
    beyond = np.abs((units[0] * units[1]).sum(-1)) > alignment.chance_band(width)
    assert beyond.mean() == pytest.approx(0.01, abs=0.002)


def of_heads(cosines: list[list[float]], width: int = 64) -> Dynamics:
    """A run of one step whose heads have these cosines, by layer."""
    rows = [
        (0, 0, i, j, value)
        for i, layer in enumerate(cosines, 1)
        for j, value in enumerate(layer, 1)
    ]
    table = pd.DataFrame(rows, columns=["seed", "step", "layer", "head", "cosine"])
    # Twice as many heads as dimensions, each along one.
    means = [
        (0, 0, 1, i, "query", d, float(i % width == d))
        for i in range(2 * width)
        for d in range(width)
    ]
    columns = ["seed", "step", "layer", "head", "space", "dimension", "mean"]
    return Dynamics(
        {"qk_alignment": table, "head_means": pd.DataFrame(means, columns=columns)}, {"seeds": [0]}
    )


def of_means(spread: np.ndarray, heads: int) -> Dynamics:
    """A run of one step whose mean queries and keys are Gaussian, with these deviations by
    dimension.
    """
    means = np.random.default_rng(1).normal(size=(heads, 2, len(spread))) * spread
    index = pd.MultiIndex.from_product(
        [[0], [0], [1], range(heads), ["query", "key"], range(len(spread))]
    )
    index.names = ["seed", "step", "layer", "head", "space", "dimension"]
    table = pd.Series(means.ravel(), index, name="mean").reset_index()
    # Values, which no position turns, are spread evenly.
    values = table[table["space"] == "key"].assign(space="value", mean=1.0)
    return Dynamics({"head_means": pd.concat([table, values])}, {"seeds": [0]})


def test_independent_directions_of_a_run_have_the_variance_of_as_many_dimensions_as_it_says():
    even = of_means(np.ones(16), 400)
    assert alignment.chance_dimensions(even) == pytest.approx(16, abs=0.3)
    # A third of the dimensions is all that rotation leaves, and half of another.
    spread = np.array([1.0] * 8 + [0.7] * 8 + [0.01] * 8)
    run = of_means(spread, 4000)
    found = alignment.chance_dimensions(run)
    assert found == pytest.approx((spread**2).sum() ** 2 / (spread**4).sum(), rel=0.03)
    wide = run["head_means"].pivot(index="head", columns=["space", "dimension"], values="mean")
    q, k = wide["query"].to_numpy(), wide["key"].to_numpy()
    cosine = (q * k).sum(1) / np.linalg.norm(q, axis=1) / np.linalg.norm(k, axis=1)
    assert np.mean(cosine**2) == pytest.approx(1 / found, rel=0.05)
    assert np.mean(np.abs(cosine) > alignment.chance_band(found)) == pytest.approx(0.01, abs=0.004)
    assert np.mean(np.abs(cosine) > alignment.chance_band(24)) > 0.02


@pytest.mark.parametrize(
    ("layers", "sizes"),
    [
        (1, (1, 0, 0)),
        (2, (1, 0, 1)),
        (3, (1, 1, 1)),
        (4, (1, 2, 1)),
        (5, (2, 1, 2)),
        (12, (4, 4, 4)),
    ],
)
def test_the_thirds_of_the_layers(layers, sizes):
    run = of_heads([[0.0]] * layers)
    names = [
        name
        for name, size in zip(("first", "middle", "last"), sizes, strict=True)
        for _ in range(size)
    ]
    assert alignment.third_of_layers(run["qk_alignment"], layers).tolist() == [
        f"{name} third" for name in names
    ]


def test_the_cosine_of_a_layer_is_that_of_its_heads_concatenated():
    run = planted(thirds_apart, seeds=(0, 1))
    means = run["head_means"].sort_values(["head", "dimension"])
    table = alignment.cosine_of_layers(run)
    assert len(table) == 2 * len(STEPS) * LAYERS
    for row in table.itertuples():
        part = means[
            (means["seed"] == row.seed)
            & (means["step"] == row.step)
            & (means["layer"] == row.layer)
        ]
        q, k = (part[part["space"] == space]["mean"].to_numpy() for space in ("query", "key"))
        assert len(q) == HEADS * WIDTH
        assert row.cosine == pytest.approx(q @ k / np.linalg.norm(q) / np.linalg.norm(k), abs=1e-12)


def test_chance_is_the_law_of_independent_directions():
    q, k = np.random.default_rng(0).normal(size=(2, 4000, WIDTH))
    cosine = (q * k).sum(1) / np.linalg.norm(q, axis=1) / np.linalg.norm(k, axis=1)
    for value in (0.1, 0.3, 0.5):
        found = (np.abs(cosine) >= value).mean()
        assert found == pytest.approx(alignment.chance_of_cosine(np.array(value), WIDTH), abs=0.03)
    at_the_edge = alignment.chance_of_cosine(np.array(-alignment.chance_band(WIDTH)), WIDTH)
    assert at_the_edge == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("ways", "ends", "onset"),
    [
        ({0: 0.0, 0.01: 0.9, 0.1: 0.9, 1: 0.9}, "similar", 0.01),
        # The onset is on the side of the end, and stays where the cosine returns into the band.
        ({0: 0.0, 0.01: 0.9, 0.1: 0.1, 1: -0.9}, "opposite", 1),
        ({0: 0.0, 0.01: -0.9, 0.1: 0.1, 1: -0.9}, "opposite", 0.01),
        ({0: 0.9, 0.01: 0.9, 0.1: -0.9, 1: 0.9}, "similar", 0),
        ({0: 0.0, 0.01: 0.9, 0.1: 0.9, 1: 0.1}, "within the band", None),
    ],
)
def test_where_a_head_ends_and_when_it_is_there_first(ways, ends, onset):
    found = alignment.head_ends(planted(lambda layer, head, way, seed: ways[way]))
    assert len(found) == LAYERS * HEADS
    assert found["cosine"].eq(ways[1]).all()
    assert found["ends"].eq(ends).all()
    assert found["onset"].isna().all() if onset is None else found["onset"].eq(onset).all()
    thirds = found.groupby("layer")["part"].first().tolist()
    assert thirds == [f"{name} third" for name in ("first", "middle", "last") for _ in range(2)]


@pytest.mark.parametrize("of_12", [(1, 5, 10, 12), (1, 3, 7, 12)])
@pytest.mark.parametrize("depth", [1, 2, 4, 6, 12, 24])
def test_the_layers_drawn_exist_in_any_depth(of_12, depth):
    shown = SimpleNamespace(layers=depth)
    layers = run_cells("training/alignment", "def like_the_paper", shown=shown)["like_the_paper"](
        of_12
    )
    assert layers[0] == 1
    assert layers[-1] == depth
    assert layers == sorted(set(layers))
    if depth == 12:
        assert layers == list(of_12)
