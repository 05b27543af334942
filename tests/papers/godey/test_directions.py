"""Directions of queries and keys, against numpy's singular vectors and on a planted run."""

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planted import run_cells
from planted_run import WIDTH, planted, thirds_apart

from analysis_lib.errors import AnalysisError
from analysis_lib.papers.godey.alignment import chance_band
from analysis_lib.papers.godey.directions import drift_along, projections, singular_directions
from analysis_lib.papers.godey.dynamics import Dynamics

DIMENSIONS = [str(dimension) for dimension in range(WIDTH)]


def of_head(run: Dynamics, end: str, vectors: str = "both") -> list[pd.DataFrame]:
    """The sampled vectors and the means of one of the heads shown, on its directions."""
    return [table[table["head"].str.startswith(end)] for table in projections(run, vectors)]


def skewed(seed: int, rows: int = 60, dim: int = 6) -> np.ndarray:
    """Vectors with a mean, and spread over directions of clearly unequal lengths."""
    draw = np.random.default_rng(seed)
    return draw.normal(0.3, 1, (rows, dim)) * np.geomspace(8, 0.5, dim) @ np.linalg.qr(draw.normal(size=(dim, dim)))[0]


def test_the_directions_are_those_of_numpy():
    vectors = planted(thirds_apart)["vectors"][DIMENSIONS].to_numpy(np.float64)
    for sample in (vectors, skewed(1)):
        ours = singular_directions(sample, sample.mean(0))
        theirs = np.linalg.svd(sample, full_matrices=False)[2][:2]
        np.testing.assert_allclose(ours, theirs * np.sign((ours * theirs).sum(1))[:, None], atol=1e-8)
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
        return [table for vectors in ("query", "key", "both") for table in projections(run, vectors)]

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
@pytest.mark.parametrize("vectors", ["both", "query", "key"])
def test_clouds_and_paths_lie_on_the_same_directions(end, layer, head, vectors):
    run = planted(thirds_apart, seeds=(3, 4))
    sampled = run["vectors"].query("layer == @layer and head == @head")
    values = sampled[DIMENSIONS].to_numpy(np.float64)
    chosen = values if vectors == "both" else values[sampled["space"] == vectors]
    basis = np.linalg.svd(chosen, full_matrices=False)[2][:2]
    towards = values[(sampled["space"] == "key") & (sampled["step"] == 1000)].mean(0)
    basis *= np.sign(basis @ towards)[:, None]
    cloud, path = of_head(run, end, vectors)
    assert cloud["head"].unique().tolist() == [f"{end} (layer {layer}, head {head})"]
    np.testing.assert_allclose(cloud[["x", "y"]], values @ basis.T, atol=1e-6)
    path = path.set_index(["space", "step"])[["x", "y"]]
    means = run["head_means"].query("seed == 3 and layer == @layer and head == @head")
    for (space, step), part in means.groupby(["space", "step"]):
        mean = part.sort_values("dimension")["mean"].to_numpy()
        np.testing.assert_allclose(path.loc[(space, step)], basis @ mean, atol=1e-6)


def test_the_clouds_of_keys_that_turn_against_the_queries_part():
    """The planted direction is dimension 0: queries at 2, opposite keys at -2 times 0.84."""
    last = of_head(planted(thirds_apart), "opposite")[0].query("step == 1000").groupby("space")["x"].mean()
    assert last["key"] > 0 > last["query"]
    assert abs(last["query"]) == pytest.approx(2, abs=0.2)


def test_how_much_the_directions_hold_follows_the_planted_drift():
    """The mean query moves from 1 to 2 along dimension 0, the mean key from (0, 1) to 2·(-0.88, 0.47)."""
    found = planted(thirds_apart)
    drift = drift_along(found).query("head == 'opposite'").set_index("vectors")
    assert drift.index.tolist() == ["both", "key", "query"]
    vectors = found["vectors"][lambda table: (table["layer"] == 5) & (table["head"] == 1)]
    sample = {"both": vectors, "key": vectors[vectors["space"] == "key"], "query": vectors[vectors["space"] == "query"]}
    dimensions = [str(d) for d in range(WIDTH)]
    everything = vectors[dimensions].to_numpy()
    first = {name: np.linalg.svd(part[dimensions].to_numpy())[2] for name, part in sample.items()}
    key_move = np.array([2 * -0.88, 2 * math.sqrt(1 - 0.88**2) - 1, *[0] * (WIDTH - 2)])
    for name, directions in first.items():
        row = drift.loc[name]
        held = np.square(everything @ directions[:2].T).sum(0) / np.square(everything).sum()
        assert row["first"] == pytest.approx(held[0])
        assert row["first_two"] == pytest.approx(held.sum())
        cosine = abs(directions[0] @ first["both"][0])
        assert row["angle"] == pytest.approx(math.degrees(math.acos(min(1, cosine))), abs=1e-4)
        assert abs(row["query"]) == pytest.approx(abs(directions[0, 0]))
        assert row["query_share"] == pytest.approx(directions[0, 0] ** 2)
        assert abs(row["key"]) == pytest.approx(abs(directions[0] @ key_move))
        assert row["key_share"] == pytest.approx((directions[0] @ key_move) ** 2 / (key_move @ key_move))
    # Opposite drifts: the two means move to opposite sides.
    assert drift.loc["both", "query"] * drift.loc["both", "key"] < 0


@pytest.mark.parametrize(
    ("checkpoints", "asked", "shown"),
    [
        ((0, 20, 40, 60, 200, 2000), [], [0, 40, 200, 2000]),
        ((0, 1, 2, 3, 4), [], [0, 4]),
        ((0, 20, 40, 2000), [35, 9999], [40, 2000]),
    ],
)
def test_steps_shown_are_those_nearest_to_what_is_asked_or_to_shares_of_the_run(checkpoints, asked, shown):
    names = {"measured": planted(thirds_apart, steps=checkpoints), "steps": asked}
    assert run_cells("training/queries-and-keys", "wanted = steps or", **names)["some"] == shown


def test_drifts_along_one_line_are_held_by_each_others_directions_and_those_at_right_angles_are_not():
    chance = chance_band(WIDTH) ** 2
    for size, crossed in ((0.9999, True), (1e-3, False)):
        run = planted(lambda layer, head, way, seed, size=size: size * (-1) ** (head == 2))
        for _, drift in drift_along(run).set_index("vectors").groupby("head"):
            shares = [drift.loc["key", "query_share"], drift.loc["query", "key_share"]]
            assert (min(shares) > 0.99) if crossed else (max(shares) < chance)
