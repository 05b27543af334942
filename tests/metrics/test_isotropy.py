"""What isotropic looks like: the law of the cosine in d dimensions, and the distance of a cloud
from it.
"""

import copy
import math
from dataclasses import replace
from unittest.mock import MagicMock

import numpy as np
import pandas as pd
import pytest
import torch
from clouds import accumulated, activations_of, repeatable, seeds
from hypothesis import given
from hypothesis import strategies as st
from planted import run_cells
from scipy import integrate, stats
from sklearn.decomposition import PCA

from analysis_lib import AnalysisError, measure, metrics
from analysis_lib.capture.vectors import Vectors
from analysis_lib.corpora import Corpus
from analysis_lib.measurement import shards
from analysis_lib.measurement.tables import Report, Tables
from analysis_lib.metrics import moments
from analysis_lib.metrics.accumulator import GROUPS
from analysis_lib.metrics.anisotropy import isotropic_cosine_quantile

# --- The density of the cosine --------------------------------------------------------------------


density = run_cells("anisotropy/isotropy", "def density")["density"]


@pytest.mark.parametrize("dimensions", [3, 4, 16, 768, 10**6])
def test_the_density_integrates_to_one_and_to_the_percentile(dimensions):
    # Nothing is left 20 standard deviations out, and the integrator must not step over the peak.
    reach = min(1, 20 / math.sqrt(dimensions))

    def mass(low: float, high: float, power: int = 0) -> float:
        return integrate.quad(
            lambda c: c**power * density(c, dimensions), low, high, epsabs=1e-13, limit=200
        )[0]

    assert mass(-reach, 0) + mass(0, reach) == pytest.approx(1, abs=1e-8)
    assert dimensions * 2 * mass(0, reach, power=2) == pytest.approx(1, abs=1e-8)
    percentile = isotropic_cosine_quantile(dimensions)
    assert mass(-reach, 0) + mass(0, percentile) == pytest.approx(0.95, abs=1e-8)


def test_the_density_by_hand():
    # In the plane the angle is uniform: 1 / (π √(1 − c²)), with poles at the ends.
    np.testing.assert_allclose(
        density(np.array([-1.0, 0.0, 0.6, 1.0]), 2), [np.inf, 1 / np.pi, 1 / (0.8 * np.pi), np.inf]
    )
    np.testing.assert_allclose(density(np.array([-1.0, 0.3, 1.0]), 3), 0.5)
    # Of an angle to a direction in five dimensions: 3/4 (1 − c²).
    np.testing.assert_allclose(density(np.array([-2.0, 0.5, 1.0, 1.1]), 5), [0, 9 / 16, 0, 0])
    # In very many dimensions, a normal law of variance 1/d.
    assert density(1e-3, 10**6) == pytest.approx(stats.norm(scale=1e-3).pdf(1e-3), rel=1e-5)


def test_the_density_is_that_of_drawn_directions():
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=(2, 20_000, 12))
    cosines = (
        (first * second).sum(1) / np.linalg.norm(first, axis=1) / np.linalg.norm(second, axis=1)
    )
    grid = np.linspace(-1, 1, 2001)
    cumulated = integrate.cumulative_simpson(density(grid, 12), x=grid, initial=0)
    assert stats.kstest(cosines, lambda c: np.interp(c, grid, cumulated)).pvalue > 0.01


def test_a_line_has_no_angles():
    with pytest.raises(AnalysisError, match="1 dimensions"):
        isotropic_cosine_quantile(1)


# --- The metric, by hand --------------------------------------------------------------------------


def isotropy_of(*utterances: np.ndarray, **options) -> dict[str, float]:
    metric = accumulated(metrics.Isotropy(), activations_of(list(utterances), **options))
    return metric.table().iloc[0].to_dict()


@pytest.mark.parametrize(
    ("vectors", "cosine", "square", "score"),
    [
        # Two orthogonal vectors: their differences from the mean lie along one line.
        ([[2, 0], [0, 3]], 0, 0, 0),
        # One line, there and back: no direction on average, but a single one.
        ([[2, 0], [-1, 0], [3, 0], [-4, 0]], -1 / 3, 1, 0),
        # A cross: of six pairs, the two along an arm have a cosine of -1. Both variances are the
        # same.
        ([[1, 0], [-1, 0], [0, 1], [0, -1]], -1 / 3, 1 / 3, 1),
        # The same cross, one arm twice as long: cosines do not see it. Variances 4 : 1, P = 25/17.
        ([[2, 0], [-2, 0], [0, 1], [0, -1]], -1 / 3, 1 / 3, 25 / 17 - 1),
    ],
)
def test_isotropy_by_hand(vectors, cosine, square, score):
    row = isotropy_of(np.array(vectors, dtype=float))
    assert row["dimensions"] == 2
    assert row["tokens"] == len(vectors)
    assert row["deviations"] == pytest.approx(cosine * math.sqrt(2), abs=1e-12)
    assert row["mean_square_cosine"] == pytest.approx(square, abs=1e-12)
    assert 1 / row["effective_dimension"] == pytest.approx(square, abs=1e-12)
    assert row["isoscore"] == pytest.approx(score, abs=1e-12)


def test_a_zero_vector_has_no_direction_and_is_a_point_of_the_cloud():
    row = isotropy_of(np.array([[1.0, 0], [-1, 0], [0, 1], [0, -1], [0, 0]]))
    assert row["tokens"] == 4
    assert row["mean_square_cosine"] == pytest.approx(1 / 3)
    # Off the origin it matters: covariance with it, from numpy.
    cloud = np.array([[3.0, 1], [4, 1], [0, 0]])
    assert isotropy_of(cloud)["isoscore"] == pytest.approx(published_isoscore(cloud))


def dimensions_in_use(table: pd.DataFrame) -> pd.Series:
    """What the page makes of the IsoScore of an ``isotropy`` table: dimensions seen from the
    mean.
    """
    drawn = {"isotropy": table, "sns": MagicMock(), "figures": MagicMock()}
    return run_cells("anisotropy/isotropy", "used = 1 + ", **drawn)["clouds"]["used"]


def test_dimensions_in_use_are_the_participation_ratio_around_the_mean():
    round_cloud = np.random.default_rng(0).normal(size=(200, 4))
    for cloud in (round_cloud + 5, round_cloud * [10, 1, 0.1, 0.1]):
        variances = np.linalg.eigvalsh(np.cov(cloud.T))
        expected = variances.sum() ** 2 / (variances**2).sum()
        assert dimensions_in_use(pd.DataFrame([isotropy_of(cloud)]))[0] == pytest.approx(
            expected, rel=1e-6
        )
    table = pd.DataFrame({"isoscore": [0.9, 0.5, 0.1], "dimensions": 11})
    assert dimensions_in_use(table).tolist() == pytest.approx([10, 6, 2])


def test_vectors_that_are_all_the_same_have_no_isoscore():
    row = isotropy_of(np.tile([0.1, 0.7, 0.3], (50, 1)))
    assert row["effective_dimension"] == pytest.approx(1)
    assert math.isnan(row["isoscore"])


def published_isoscore(points: np.ndarray) -> float:
    """IsoScore step by step (Rudman et al. 2022, sec. 4), with scikit-learn's principal
    components.
    """
    n = points.shape[1]
    variances = np.zeros(n)
    found = PCA().fit(points).explained_variance_
    variances[: len(found)] = found  # A few points span fewer dimensions.
    normalised = math.sqrt(n) * variances / np.linalg.norm(variances)
    defect = np.linalg.norm(normalised - np.ones(n)) / math.sqrt(2 * (n - math.sqrt(n)))
    share = (n - defect**2 * (n - math.sqrt(n))) ** 2 / n**2
    return (n * share - 1) / (n - 1)


@repeatable
@given(seeds, st.integers(2, 60), st.integers(2, 15))
def test_isoscore_is_that_of_the_published_algorithm(seed, tokens, dim):
    rng = np.random.default_rng(seed)
    points = rng.normal(size=(tokens, dim)) * rng.exponential(size=dim) + rng.normal(size=dim) * 3
    assert isotropy_of(points)["isoscore"] == pytest.approx(published_isoscore(points), abs=1e-9)


# --- Every pair, in a double loop -----------------------------------------------------------------


def naive(vectors: np.ndarray) -> tuple[float, float]:
    """The mean cosine and the mean squared cosine of the pairs of distinct vectors, one by one."""
    cosines = [
        float(np.dot(a, b)) / math.sqrt(float(np.dot(a, a)) * float(np.dot(b, b)))
        for i, a in enumerate(vectors)
        for j, b in enumerate(vectors)
        if i != j
    ]
    return sum(cosines) / len(cosines), sum(cosine**2 for cosine in cosines) / len(cosines)


@pytest.mark.parametrize("drift", [0.0, 1.0, 30.0, 1000.0])
@pytest.mark.parametrize("precision", [torch.float32, torch.float64])
def test_one_pass_is_the_double_loop_however_far_the_cloud_has_drifted(drift, precision):
    rng = np.random.default_rng(3)
    cloud = rng.normal(size=(60, 24)) * np.linspace(0.2, 2, 24) + drift * rng.normal(size=24)
    values = torch.as_tensor(cloud).to(precision)
    cloud = values.double().numpy()  # What the metric sees; the rest is float64.
    padded = activations_of([cloud[:25], cloud[25:26], cloud[26:]])
    space = padded.spaces["hidden"]
    activations = replace(
        padded, spaces={"hidden": Vectors(space.values.to(precision), space.tokens)}
    )
    row = accumulated(metrics.Isotropy(), activations).table().iloc[0]
    cosine, square = naive(cloud)
    assert row["deviations"] == pytest.approx(cosine * math.sqrt(24), rel=1e-5)
    assert row["mean_square_cosine"] == pytest.approx(square, rel=1e-9)
    assert row["isoscore"] == pytest.approx(published_isoscore(cloud), rel=1e-5)


def test_heads_are_measured_one_by_one():
    rng = np.random.default_rng(4)
    vectors = rng.normal(size=(3, 12, 5)) + np.array([0.0, 1.0, 5.0])[:, None, None]
    metric = metrics.Isotropy(("query",))
    table = accumulated(metric, activations_of([vectors[:, :7], vectors[:, 7:]], "query")).table()
    assert table["head"].tolist() == [1, 2, 3]
    for head, row in enumerate(table.itertuples()):
        assert row.mean_square_cosine == pytest.approx(naive(vectors[head])[1])
        assert row.isoscore == pytest.approx(published_isoscore(vectors[head]))


# --- Laws -----------------------------------------------------------------------------------------

MEASURES = ["deviations", "mean_square_cosine", "effective_dimension", "isoscore"]


@repeatable
@given(seeds, st.integers(3, 20), st.integers(2, 10), st.floats(1e-3, 1e3))
def test_rotation_and_scale_change_nothing(seed, tokens, dim, scale):
    rng = np.random.default_rng(seed)
    cloud = rng.normal(size=(tokens, dim)) + rng.normal(size=dim)
    rotation, _ = np.linalg.qr(rng.normal(size=(dim, dim)))
    before, after = isotropy_of(cloud), isotropy_of(scale * cloud @ rotation)
    for name in MEASURES:
        assert after[name] == pytest.approx(before[name], rel=1e-8, abs=1e-10)
    assert 0 <= before["mean_square_cosine"] <= 1 + 1e-12
    assert -1e-12 <= before["isoscore"] <= 1 + 1e-12
    assert -math.sqrt(dim) / (tokens - 1) - 1e-12 <= before["deviations"] <= math.sqrt(dim) + 1e-12


@pytest.mark.parametrize("dim", [3, 30, 100])
def test_a_normal_cloud_uses_all_its_dimensions_and_a_drifted_one_does_not(dim):
    rng = np.random.default_rng(dim)
    cloud = rng.normal(size=(4000, dim))
    row = isotropy_of(cloud)
    assert abs(row["deviations"]) < 0.05
    assert row["effective_dimension"] == pytest.approx(dim, rel=0.02)
    assert row["isoscore"] == pytest.approx(1, abs=0.05)
    # The norms do not matter to the cosines.
    stretched = isotropy_of(cloud * rng.exponential(size=(4000, 1)))
    assert stretched["mean_square_cosine"] == pytest.approx(row["mean_square_cosine"])
    # Far from the origin the cone is narrow and the cloud still round: cosines and IsoScore
    # disagree.
    drifted = isotropy_of(cloud + 20 * math.sqrt(dim) * np.eye(dim)[0])
    assert drifted["deviations"] == pytest.approx(math.sqrt(dim), rel=0.01)
    assert drifted["effective_dimension"] == pytest.approx(1, rel=0.01)
    assert drifted["isoscore"] == pytest.approx(row["isoscore"])


def test_half_of_the_dimensions_at_the_origin():
    """A centred cloud in 20 of 40 dimensions: the mean cosine sees nothing, the two others do."""
    cloud = np.zeros((4000, 40))
    cloud[:, :20] = np.random.default_rng(0).normal(size=(4000, 20))
    row = isotropy_of(cloud)
    assert abs(row["deviations"]) < 0.05
    assert row["effective_dimension"] == pytest.approx(20, rel=0.02)
    assert row["isoscore"] == pytest.approx(19 / 39, rel=0.02)


# --- The accumulator ------------------------------------------------------------------------------


@pytest.fixture
def utterances() -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.normal(size=(int(rng.integers(1, 9)), 6)) + 0.4 for _ in range(30)]


def test_merging_is_one_pass(utterances):
    groups = [i % GROUPS for i in range(30)]
    whole = accumulated(metrics.Isotropy(), activations_of(utterances, groups=groups))
    first = accumulated(metrics.Isotropy(), activations_of(utterances[:11], groups=groups[:11]))
    before = copy.deepcopy(first.arrays())
    merged = whole.fresh()
    for part in (
        first,
        accumulated(metrics.Isotropy(), activations_of(utterances[11:], groups=groups[11:])),
    ):
        merged.merge(part)
    assert merged.table().round(10).equals(whole.table().round(10))
    after = first.arrays()
    assert all(np.array_equal(sums.values, after[key].values) for key, sums in before.items())


def test_the_interval_is_that_of_the_mean_cosine(utterances):
    groups = [i % GROUPS for i in range(30)]
    activations = activations_of(utterances, groups=groups)
    ours = accumulated(metrics.Isotropy(), activations).table().iloc[0]
    cosine = accumulated(metrics.Anisotropy(), activations).table().iloc[0]
    for name, other in (("deviations", "cosine"), ("ci_low", "ci_low"), ("ci_high", "ci_high")):
        assert ours[name] == pytest.approx(cosine[other] * math.sqrt(6))
    assert ours["ci_low"] < ours["deviations"] < ours["ci_high"]


def test_columns_and_rows():
    activations = activations_of([np.eye(3)])
    tokens = activations.spaces["hidden"].tokens
    activations.spaces["key"] = Vectors(torch.rand(1, 2, 3, 4).double(), tokens)
    metric = metrics.Isotropy(("key", "hidden"))
    table = accumulated(metric.fresh(), activations).table()
    assert table.columns.tolist() == [
        *(
            "space",
            "layer",
            "head",
            "dimensions",
            "deviations",
            "ci_low",
            "ci_high",
            "mean_square_cosine",
        ),
        *("effective_dimension", "isoscore", "tokens"),
    ]
    assert table["space"].tolist() == ["hidden", "key", "key"]
    assert table["dimensions"].tolist() == [3, 4, 4]
    assert accumulated(metrics.Isotropy(), activations).table()["space"].tolist() == ["hidden"]


def test_a_model_is_measured_in_shards_that_can_be_kept(minilm, sentences, tmp_path, monkeypatch):
    corpus = Corpus("sentences", sentences)
    whole = measure(minilm, corpus, "isotropy,anisotropy", progress=False)
    table, cosines = whole["isotropy"], whole["anisotropy"].query("space == 'hidden'").reset_index()
    np.testing.assert_allclose(table["deviations"], cosines["cosine"] * math.sqrt(384))
    assert table["dimensions"].eq(384).all()
    assert table["effective_dimension"].between(1, 384).all()
    assert table["isoscore"].between(0, 1).all()
    monkeypatch.setattr(shards, "UTTERANCES_PER_SHARD", 20)
    for _ in ("measured", "read again"):
        again = measure(minilm, corpus, "isotropy", checkpoints=tmp_path, progress=False)[
            "isotropy"
        ]
        # Utterances are batched with others now, in float32.
        pd.testing.assert_frame_equal(again, table, rtol=1e-4)


def test_all_leaves_it_out_and_its_name_calls_it():
    assert "isotropy" not in [metric.name for metric in metrics.resolve("all")]
    assert [metric.name for metric in metrics.resolve("isotropy,anisotropy")] == [
        "isotropy",
        "anisotropy",
    ]
    with pytest.raises(AnalysisError, match="did you mean query"):
        metrics.Isotropy(("queries",))


def test_a_statistic_over_it_is_told_to_use_its_interval(utterances):
    activations = activations_of(utterances, groups=[i % GROUPS for i in range(30)])
    metric, other = (
        accumulated(kind(), activations) for kind in (metrics.Isotropy, metrics.Anisotropy)
    )
    report = Report()
    report.add(replace(activations, layer=0))
    tables = Tables([metric, other], report, {})
    with pytest.raises(AnalysisError, match="ci_low and ci_high"):
        tables.interval(lambda t: t["isotropy"]["effective_dimension"].min())
    # Beside it, other tables keep theirs.
    found = tables.interval(lambda t: t["anisotropy"]["cosine"].max())
    row = tables["anisotropy"].set_index("cosine").loc[found.value]
    assert found.row[1:] == pytest.approx((row["ci_low"], row["ci_high"]))


def test_what_cannot_be_measured_is_refused(monkeypatch):
    with pytest.raises(AnalysisError, match=r"two vectors.*layer 1 has 1"):
        isotropy_of(np.array([[1.0, 2.0], [0.0, 0.0]]))
    with pytest.raises(AnalysisError, match="isotropy: layer 1 has vectors that are not finite"):
        isotropy_of(np.array([[1.0, np.inf], [0.0, 1.0]]))
    monkeypatch.setattr(moments, "WIDEST", 3)
    with pytest.raises(AnalysisError, match="hidden vectors of layer 1 have 4 dimensions"):
        isotropy_of(np.eye(4))
    with pytest.raises(AnalysisError, match="nothing was measured"):
        metrics.Isotropy().table()
