"""Directions of queries and keys, against numpy's singular vectors and on a planted run."""

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planted import run_cells
from planted_run import WIDTH, planted, thirds_apart

from analysis_book.papers.godey.alignment import chance_band, chance_dimensions
from analysis_book.papers.godey.directions import projections, shared_drift, singular_directions
from analysis_book.training.dynamics import Dynamics
from analysis_lib.errors import AnalysisError

DIMENSIONS = [str(dimension) for dimension in range(WIDTH)]


def of_head(run: Dynamics, end: str, directions: str = "both") -> list[pd.DataFrame]:
    """The sampled vectors and the means of one of the heads shown, on its directions."""
    here = f"directions == '{directions}' and head.str.startswith('{end}')"
    return [table.query(here) for table in projections(run)]


def skewed(seed: int, rows: int = 60, dim: int = 6) -> np.ndarray:
    """Vectors with a mean, and spread over directions of clearly unequal lengths."""
    draw = np.random.default_rng(seed)
    return (
        draw.normal(0.3, 1, (rows, dim))
        * np.geomspace(8, 0.5, dim)
        @ np.linalg.qr(draw.normal(size=(dim, dim)))[0]
    )


def test_the_directions_are_those_of_numpy():
    vectors = planted(thirds_apart)["vectors"][DIMENSIONS].to_numpy(np.float64)
    for sample in (vectors, skewed(1)):
        ours = singular_directions(sample, sample.mean(0))
        theirs = np.linalg.svd(sample, full_matrices=False)[2][:2]
        np.testing.assert_allclose(
            ours, theirs * np.sign((ours * theirs).sum(1))[:, None], atol=1e-8
        )
        assert (ours @ sample.mean(0) >= 0).all()


@given(st.integers(0, 10**6))
def test_the_sign_and_the_order_of_vectors_change_no_direction(seed):
    vectors, draw = skewed(seed), np.random.default_rng(seed)
    towards = draw.normal(size=6)
    directions = singular_directions(vectors, towards)
    np.testing.assert_allclose(directions @ directions.T, np.eye(2), atol=1e-12)
    flipped = draw.permutation(vectors * draw.choice([-1, 1], (len(vectors), 1)))
    np.testing.assert_allclose(singular_directions(flipped, towards), directions, atol=1e-7)
    np.testing.assert_allclose(singular_directions(3 * vectors, 5 * towards), directions, atol=1e-7)
    rotation = np.linalg.qr(draw.normal(size=(6, 6)))[0]
    turned = singular_directions(vectors @ rotation, towards @ rotation)
    np.testing.assert_allclose(turned, directions @ rotation, atol=1e-7)


def test_no_figure_depends_on_the_sign_of_eigenvectors(monkeypatch):
    run = planted(thirds_apart)

    def drawn_now() -> list[pd.DataFrame]:
        return [*projections(run)]

    before, real = drawn_now(), np.linalg.eigh
    monkeypatch.setattr(np.linalg, "eigh", lambda matrix: (real(matrix)[0], -real(matrix)[1]))
    for ours, theirs in zip(before, drawn_now(), strict=True):
        pd.testing.assert_frame_equal(ours, theirs)


@pytest.mark.parametrize(
    ("vectors", "words"),
    [
        (np.array([[1, math.nan], [0, 1]]), "not finite"),
        (np.array([[1, math.inf], [0, 1]]), "not finite"),
    ],
)
def test_vectors_without_directions(vectors, words):
    with pytest.raises(AnalysisError, match=words):
        singular_directions(vectors, vectors.mean(0))


@pytest.mark.parametrize(("end", "layer", "head"), [("similar", 1, 1), ("opposite", 5, 1)])
@pytest.mark.parametrize(
    ("directions", "vectors"), [("both", "both"), ("queries", "query"), ("keys", "key")]
)
def test_clouds_and_paths_lie_on_the_same_directions(end, layer, head, directions, vectors):
    run = planted(thirds_apart, seeds=(3, 4))
    sampled = run["vectors"].query("layer == @layer and head == @head")
    values = sampled[DIMENSIONS].to_numpy(np.float64)
    chosen = values if vectors == "both" else values[sampled["space"] == vectors]
    basis = np.linalg.svd(chosen, full_matrices=False)[2][:2]
    towards = values[(sampled["space"] == "key") & (sampled["step"] == 1000)].mean(0)
    basis *= np.sign(basis @ towards)[:, None]
    cloud, path = of_head(run, end, directions)
    assert cloud["head"].unique().tolist() == [f"{end} (layer {layer}, head {head})"]
    np.testing.assert_allclose(cloud[["x", "y"]], values @ basis.T, atol=1e-6)
    path = path.set_index(["space", "step"])[["x", "y"]]
    means = run["head_means"].query("seed == 3 and layer == @layer and head == @head")
    for (space, step), part in means.groupby(["space", "step"]):
        mean = part.sort_values("dimension")["mean"].to_numpy()
        np.testing.assert_allclose(path.loc[(space, step)], basis @ mean, atol=1e-6)


def test_the_clouds_of_keys_that_turn_against_the_queries_part():
    """The planted direction is dimension 0: queries at 2, opposite keys at -2 times 0.84."""
    last = (
        of_head(planted(thirds_apart), "opposite")[0]
        .query("step == 1000")
        .groupby("space")["x"]
        .mean()
    )
    assert last["key"] > 0 > last["query"]
    assert abs(last["query"]) == pytest.approx(2, abs=0.2)


def test_how_much_of_the_drift_a_line_holds_follows_the_planted_one():
    """The mean query moves from 1 to 2 along one dimension, the mean key from (0, 1) to 2·(-0.88,
    0.47).
    """
    run = planted(thirds_apart)
    found = shared_drift(run).query("layer == 5 and head == 1").set_index("direction")
    steps = np.array([0, 10, 100, 1000])
    way = steps / 1000
    cosine = -0.88 * way
    means = {"query": np.stack([1 + way, 0 * way], 1)}
    means["key"] = (1 + way)[:, None] * np.stack([cosine, np.sqrt(1 - cosine**2)], 1)
    first = {name: np.linalg.svd(rows)[2][0] for name, rows in means.items()}
    first["both"] = np.linalg.svd(np.concatenate([*means.values()]))[2][0]
    drift = {name: rows[-1] - rows[0] for name, rows in means.items()}

    def share(space: str, line: str) -> float:
        return (drift[space] @ first[line]) ** 2 / (drift[space] @ drift[space])

    assert found["share"].to_dict() == {
        "of both": pytest.approx(min(share("query", "both"), share("key", "both"))),
        "of the other": pytest.approx(min(share("query", "key"), share("key", "query"))),
    }
    band = chance_band(chance_dimensions(run))
    assert found["chance"].to_dict() == pytest.approx(
        {"of both": (1 + band) / 2, "of the other": band**2}
    )


def test_no_line_holds_more_of_both_drifts_than_their_cosine_allows():
    run = planted(thirds_apart, seeds=(0, 1))
    means = run["head_means"].query("space != 'value'")
    means = means.pivot(
        index=["seed", "layer", "head", "space", "dimension"], columns="step", values="mean"
    )
    drift = (means[1000] - means[0]).unstack("space")
    products = (drift["query"] * drift["key"]).groupby(["seed", "layer", "head"]).sum()
    lengths = np.sqrt((drift**2).groupby(["seed", "layer", "head"]).sum()).prod(axis=1)
    most = (1 + (products / lengths).abs()) / 2
    share = (
        shared_drift(run)
        .query("direction == 'of both'")
        .set_index(["seed", "layer", "head"])["share"]
    )
    assert (share <= most + 1e-9).all()


@pytest.mark.parametrize(
    ("asked", "shown"), [([0, 500, 5000], {0, 400, 2000}), ([35, 9999], {40, 2000})]
)
def test_steps_shown_are_those_nearest_to_what_is_asked(asked, shown):
    run = planted(thirds_apart, steps=(0, 20, 40, 400, 2000))
    names = {"load_runs": lambda *_: {"planted": run}, "steps": asked, "display": print}
    assert run_cells("training/queries-and-keys", "= load_runs(", **names)["some"] == shown


@pytest.mark.parametrize(("size", "beyond"), [(0.9999, True), (1e-3, False)])
def test_drifts_along_one_line_are_held_by_each_others_directions_and_those_at_right_angles_are_not(
    size, beyond
):
    run = planted(lambda layer, head, way, seed: size * (-1) ** (head == 2), seeds=(0, 1, 2, 3, 4))
    drift = shared_drift(run)
    assert (drift["share"] > drift["chance"]).eq(beyond).all()
    names = {"measured": {"planted": run}}
    verdicts = run_cells(
        "training/queries-and-keys", "def numbers", "claims.verdicts_of_first_run", **names
    )["verdicts"]
    outcome = "holds" if beyond else "does not hold"
    # All seeds are planted alike: the leaving of the origin is that of every head.
    assert set(verdicts["verdict"]) <= {outcome, "no interval", "holds"}
    value = verdicts.set_index("id")["value"]
    assert (value.drop("godey-distributions-leave-origin") > 0).eq(beyond).all()
    assert value["godey-distributions-leave-origin"] == 1
