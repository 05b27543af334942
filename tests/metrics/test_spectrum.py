"""Spectra of clouds and entropies of texts: by hand, against numpy's SVD, and the laws they obey."""

import math

import numpy as np
import pytest
from clouds import accumulated, activations_of, repeatable, seeds
from hypothesis import given

from analysis_lib import AnalysisError, metrics
from analysis_lib.metrics.spectrum import decay, effective_rank


def spectrum_of(*utterances: np.ndarray, **parameters) -> dict[str, float]:
    activations = activations_of([np.asarray(vectors, float) for vectors in utterances])
    metric = accumulated(metrics.Spectrum(**parameters), activations)
    return metric.table().iloc[0].to_dict()


def entropy_of(*utterances: np.ndarray) -> dict[str, float]:
    activations = activations_of([np.asarray(vectors, float) for vectors in utterances])
    return accumulated(metrics.TextEntropy(), activations).table().iloc[0].to_dict()


def rankme_of_svd(vectors: np.ndarray) -> float:
    """Garrido et al. 2023, from numpy's singular values."""
    sizes = np.linalg.svd(vectors, compute_uv=False)
    shares = sizes / sizes.sum()
    return math.exp(-sum(share * math.log(share) for share in shares if share > 1e-12))


def test_a_spectrum_by_hand():
    # Around zero, squares 18 and 8, so that σ are 3 : 2; the mean is 0 and λ are 9 : 4.
    row = spectrum_of([[3, 0], [0, 2]], [[-3, 0], [0, -2]])
    assert row["rankme"] == pytest.approx(0.6**-0.6 * 0.4**-0.4)
    p = 9 / 13
    assert row["effective_rank"] == pytest.approx(p**-p * (1 - p) ** (p - 1))
    assert (row["top_1"], row["top_10"], row["tokens"]) == (pytest.approx(p), 1, 4)
    assert math.isnan(row["alpha"])


def test_rankme_keeps_the_mean_and_the_effective_rank_does_not():
    # Far from the origin: one direction has almost everything, around the mean two share alike.
    row = spectrum_of([[1e4 + 1, 0, 0], [1e4 - 1, 0, 0], [1e4, 1, 0], [1e4, -1, 0]])
    assert row["rankme"] == pytest.approx(1, abs=1e-2)
    assert row["effective_rank"] == pytest.approx(2)


def test_vectors_that_are_all_the_same_have_no_spread():
    row = spectrum_of([[1, 2], [1, 2]], [[1, 2]])
    assert row["rankme"] == pytest.approx(1)
    missing = [row[name] for name in ("effective_rank", "alpha", "top_1", "top_10")]
    assert np.isnan(missing).all()


@given(seeds)
@repeatable
def test_rankme_is_that_of_numpys_singular_values(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 30, 4)
    scales = 10.0 ** rng.uniform(-4, 1, 12)
    texts = [rng.normal(1, 1, (length, 12)) * scales for length in lengths]
    vectors = np.concatenate(texts)
    row = spectrum_of(*texts)
    assert row["rankme"] == pytest.approx(rankme_of_svd(vectors), rel=1e-6)
    variances = np.linalg.svd(vectors - vectors.mean(0), compute_uv=False) ** 2
    assert row["top_1"] == pytest.approx(variances[0] / variances.sum(), rel=1e-9)
    shares = variances / variances.sum()
    entropy = -sum(share * math.log(share) for share in shares if share > 1e-15)
    assert row["effective_rank"] == pytest.approx(math.exp(entropy), rel=1e-6)


def test_the_decay_of_a_planted_power_law_is_found():
    # Rows whose covariance is exactly diagonal, with eigenvalues k^-1.3.
    ranks = np.arange(1, 129)
    sizes = np.diag(ranks**-0.65)
    row = spectrum_of(np.concatenate([sizes, -sizes]))
    assert row["alpha"] == pytest.approx(1.3)
    # Of the last 28 it asks nothing, nor of the first ten.
    changed = ranks**-1.3
    changed[:10] *= 7
    changed[100:] /= 3
    assert decay(changed) == pytest.approx(1.3)
    assert decay(np.ones(200)) == pytest.approx(0, abs=1e-12)
    assert math.isnan(decay(ranks[:11] ** -1.0))


def test_the_decay_weighs_each_factor_of_ranks_alike():
    """Against the normal equations with weights 1/k, written out."""
    ranks = np.arange(11, 101)
    eigenvalues = np.ones(120)
    eigenvalues[10:100] = 1 / (1 + (ranks / 30) ** 2)
    x, y, w = np.log(ranks), np.log(eigenvalues[10:100]), 1 / ranks
    left = [[(w * x * x).sum(), (w * x).sum()], [(w * x).sum(), w.sum()]]
    slope, _ = np.linalg.solve(left, [(w * x * y).sum(), (w * y).sum()])
    assert decay(eigenvalues) == pytest.approx(-slope, rel=1e-10)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_the_spectrum_does_not_change_with_scale(scale):
    cloud = np.random.default_rng(0).normal(1, 1, (200, 40))
    wanted, row = spectrum_of(cloud), spectrum_of(scale * cloud)
    for name in ("rankme", "effective_rank", "alpha", "top_1", "top_10"):
        assert row[name] == pytest.approx(wanted[name], rel=1e-9), name


def test_effective_rank_of_nothing_is_missing():
    assert effective_rank(np.array([[1.0, 1, 1], [5, 0, 0]])).tolist() == pytest.approx([3, 1])
    assert math.isnan(effective_rank(np.zeros(3)))


def test_a_spectrum_has_no_tables_without_a_group():
    metric = accumulated(metrics.Spectrum(), activations_of([np.eye(3)]))
    with pytest.raises(AnalysisError, match=r"spectrum cannot leave a group.*measure parts"):
        metric.leaving_out()


# --- The entropy of a text's Gram matrix ----------------------------------------------------------


def test_entropy_by_hand():
    # Two orthogonal vectors of equal length; two parallel ones; squared lengths 3 : 1.
    of_equal, of_parallel = [[2, 0], [0, 2]], [[1, 0], [3, 0]]
    of_unequal = [[math.sqrt(3), 0], [0, 1]]
    row = entropy_of(of_equal)
    assert row["entropy_nats"] == pytest.approx(math.log(2))
    assert row["order_2_nats"] == pytest.approx(math.log(2))
    assert row["entropy_normalised"] == pytest.approx(1)
    assert entropy_of(of_parallel)["entropy_nats"] == pytest.approx(0, abs=1e-12)
    row = entropy_of(of_unequal)
    assert row["entropy_nats"] == pytest.approx(2 * math.log(2) - 0.75 * math.log(3))
    assert row["order_2_nats"] == pytest.approx(-math.log(10 / 16))
    # The mean is over texts; those of one vector, and those of zeros, have none.
    row = entropy_of(of_equal, of_parallel, [[1, 0]], [[0, 0], [0, 0]])
    assert row["entropy_normalised"] == pytest.approx(0.5)
    assert row["utterances"] == 2


def test_one_long_vector_compresses_a_text():
    text = np.random.default_rng(0).normal(size=(10, 64))
    with_sink = text.copy()
    with_sink[0] *= 100
    assert entropy_of(text)["entropy_normalised"] > 0.9
    assert entropy_of(with_sink)["entropy_normalised"] < 0.02


@given(seeds)
@repeatable
def test_entropies_are_those_of_numpys_singular_values(seed):
    """Of texts with more dimensions than tokens, and with fewer."""
    rng = np.random.default_rng(seed)
    texts = [rng.normal(0.5, 1, (length, 6)) for length in rng.integers(2, 14, 3)]
    found = {"entropy_nats": [], "entropy_normalised": [], "order_2_nats": []}
    for text in texts:
        squares = np.linalg.svd(text, compute_uv=False) ** 2
        shares = squares / squares.sum()
        nats = -(shares * np.log(shares)).sum()
        found["entropy_nats"].append(nats)
        found["entropy_normalised"].append(nats / math.log(len(text)))
        gram = text @ text.T
        found["order_2_nats"].append(-math.log((gram**2).sum() / np.trace(gram) ** 2))
    row = entropy_of(*texts)
    for name, values in found.items():
        assert row[name] == pytest.approx(np.mean(values), rel=1e-9), name
    assert row["order_2_nats"] <= row["entropy_nats"] + 1e-12
