"""How often intervals hold the truth in simulated corpora: of few texts, of unequal lengths, of
clustered units.
"""

from collections.abc import Callable

import numpy as np
import pytest
import scipy.stats

from analysis_lib.corpora import Corpus
from analysis_lib.metrics.accumulator import GROUPS
from analysis_lib.metrics.anisotropy import mean_pair_cosine
from analysis_lib.metrics.intervals import jackknife_interval

DIM = 8
# So many texts of each kind and size are drawn, in corpora; and of each kind for the truth.
DRAWN, MANY = 24_000, 100_000


def equal(rng: np.random.Generator, corpora: int, texts: int) -> tuple[np.ndarray, ...]:
    """Texts of six tokens."""
    lengths = np.full((corpora, texts), 6)
    return lengths, 0.6 * rng.normal(size=(corpora, texts, DIM)), own_units(corpora, texts)


def log_normal(rng: np.random.Generator, corpora: int, texts: int) -> tuple[np.ndarray, ...]:
    """Texts of 1 to 300 tokens; long ones are farther apart."""
    lengths = np.clip(rng.lognormal(1.6, 1, (corpora, texts)).astype(int) + 1, 1, 300)
    spread = 0.6 * (1 + 0.5 * (lengths > 8))
    return (
        lengths,
        spread[..., None] * rng.normal(size=(corpora, texts, DIM)),
        own_units(corpora, texts),
    )


def heavy_tails(rng: np.random.Generator, corpora: int, texts: int) -> tuple[np.ndarray, ...]:
    """A few texts have most of the tokens, and a few lie far from the others."""
    lengths = np.clip((3 * rng.pareto(1.2, (corpora, texts))).astype(int) + 1, 1, 300)
    return lengths, 0.5 * rng.standard_t(3, size=(corpora, texts, DIM)), own_units(corpora, texts)


def pareto_units(rng: np.random.Generator, corpora: int, texts: int) -> tuple[np.ndarray, ...]:
    """Texts come in units of 1 to 40 that have much in common."""
    lengths = rng.integers(2, 12, (corpora, texts))
    sizes = np.minimum((2 * rng.pareto(1.5, (corpora, texts))).astype(int) + 1, 40)
    ends = sizes.cumsum(axis=1)
    rows, places = np.nonzero(ends < texts)
    begins = np.zeros((corpora, texts), int)
    begins[rows, ends[rows, places]] = 1
    units = begins.cumsum(axis=1)
    of_units = 0.6 * rng.normal(size=(corpora, texts, DIM))
    shared = np.take_along_axis(of_units, units[..., None], axis=1)
    return lengths, shared + 0.3 * rng.normal(size=shared.shape), units


def own_units(corpora: int, texts: int) -> np.ndarray:
    """Each text is a unit."""
    return np.tile(np.arange(texts), (corpora, 1))


KINDS = (equal, log_normal, heavy_tails, pareto_units)


def sums_of_texts(
    rng: np.random.Generator, lengths: np.ndarray, shared: np.ndarray
) -> dict[str, np.ndarray]:
    """Of tokens around what each text shares: the sums by text, of shape corpus x text (x
    dimension).
    """
    counts = lengths.ravel()
    around = np.eye(DIM)[0] + np.repeat(shared.reshape(-1, DIM), counts, axis=0)
    vectors = around + 0.7 * rng.normal(size=around.shape)
    norms = np.linalg.norm(vectors, axis=1)
    starts = np.concatenate([[0], counts.cumsum()[:-1]])
    of_tokens = {"units": vectors / norms[:, None], "vectors": vectors, "norms": norms}
    sums = {name: np.add.reduceat(values, starts, axis=0) for name, values in of_tokens.items()}
    return {
        name: values.reshape(*lengths.shape, *values.shape[1:]) for name, values in sums.items()
    }


def anisotropy(sums: dict[str, np.ndarray]) -> np.ndarray:
    return mean_pair_cosine(sums["units"], sums["tokens"])


def drift(sums: dict[str, np.ndarray]) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # A corpus of one unit, without it.
        return np.linalg.norm(sums["vectors"], axis=-1) / sums["norms"]


STATISTICS = {"anisotropy": anisotropy, "drift": drift}


def truth_of(kind: Callable) -> dict[str, float]:
    rng = np.random.default_rng(7)
    lengths, shared, _ = kind(rng, 1, MANY)
    sums = sums_of_texts(rng, lengths, shared) | {"tokens": lengths.astype(float)}
    whole = {name: values.sum(axis=1) for name, values in sums.items()}
    return {name: float(statistic(whole)[0]) for name, statistic in STATISTICS.items()}


def intervals_of(kind: Callable, texts: int) -> dict[str, tuple[np.ndarray, ...]]:
    """By statistic, of many corpora: the values, and the ends of the library's intervals."""
    rng = np.random.default_rng(texts)
    lengths, shared, units = kind(rng, DRAWN // texts, texts)
    groups = np.array(
        [Corpus("drawn", range(texts), units=row.tolist()).groups(GROUPS) for row in units]
    )
    sums = sums_of_texts(rng, lengths, shared) | {"tokens": lengths.astype(float)}
    whole = {name: values.sum(axis=1) for name, values in sums.items()}
    left_out, absent = [], []
    for group in range(GROUPS):
        ours = groups == group
        absent.append(~ours.any(axis=1))
        rest = {}
        for name, values in sums.items():
            chosen = ours if values.ndim == 2 else ours[..., None]
            rest[name] = whole[name] - (values * chosen).sum(axis=1)
        left_out.append(rest)
    found = {}
    for name, statistic in STATISTICS.items():
        values = statistic(whole)
        rest = (
            np.ma.array(statistic(part), mask=none)
            for part, none in zip(left_out, absent, strict=True)
        )
        found[name] = values, *jackknife_interval(values, rest)
    return found


# At least so often the truth is held: by kind, of anisotropy and of drift, for 20, 60 and 200
# texts.
LEAST = {
    equal: ((0.93, 0.91, 0.88), (0.92, 0.90, 0.86)),
    log_normal: ((0.91, 0.91, 0.88), (0.85, 0.88, 0.88)),
    heavy_tails: ((0.90, 0.90, 0.90), (0.82, 0.86, 0.88)),
    pareto_units: ((0.88, 0.88, 0.86), (0.81, 0.85, 0.86)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_intervals_of_few_texts_hold_the_truth(kind):
    truth = truth_of(kind)
    for place, texts in enumerate((20, 60, 200)):
        for (name, found), least in zip(
            intervals_of(kind, texts).items(), LEAST[kind], strict=True
        ):
            values, low, high = found
            known = np.isfinite(low)  # A corpus of one unit has none.
            assert known.mean() > 0.96
            values, low, high = values[known], low[known], high[known]
            held = np.mean((low <= truth[name]) & (truth[name] <= high))
            assert least[place] <= held <= 0.98, (name, texts, held)
            # The number itself stays in its interval.
            assert (low < values).all()
            assert (values < high).all()


@pytest.mark.parametrize("kind", KINDS)
def test_intervals_around_the_numbers_themselves_would_lie_too_high(kind):
    truth = truth_of(kind)
    for name, (values, low, high) in intervals_of(kind, 20).items():
        reach = (high - low) / 2
        above, otherwise = np.nanmean(low > truth[name]), np.nanmean(values - reach > truth[name])
        assert above < 0.8 * otherwise


def jackknifed(
    values: np.ndarray, statistic: Callable, smooth: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """The intervals of a statistic of texts, of shape corpus x text (x ...), one text or more in
    each group.
    """
    groups = np.arange(values.shape[1]) * GROUPS // values.shape[1]
    left_out = [statistic(values[:, groups != group]) for group in range(GROUPS)]
    return jackknife_interval(statistic(values), left_out, smooth)


def held(ends: tuple[np.ndarray, np.ndarray], truth: float) -> float:
    return float(np.mean((ends[0] <= truth) & (truth <= ends[1])))


@pytest.mark.parametrize("texts", [20, 60])
def test_statistics_with_a_kink_are_not_harmed(texts):
    """Without a bound on it, the correction would leave .84 for a size at zero, and .87 for a
    largest of six.
    """
    rng = np.random.default_rng(texts)
    values = rng.normal(size=(2000, texts))
    assert held(jackknifed(values, lambda v: np.abs(v.mean(1))), 0.0) > 0.93
    assert held(jackknifed(values + 0.1, lambda v: np.abs(v.mean(1))), 0.1) > 0.91
    several = rng.normal(size=(2000, texts, 6)) + np.linspace(0, 1, 6)
    assert held(jackknifed(several, lambda v: v.mean(1).max(-1)), 1.0) > 0.9


def test_statistics_that_jump_stay_in_the_middle_of_their_intervals():
    """A rank correlation over layers is 1 in truth; the correction would take it from there in a
    quarter of corpora.
    """
    rng = np.random.default_rng(0)
    values = 2 * rng.normal(size=(1000, 60, 8)) + np.linspace(0, 1, 8)

    def ranks(v: np.ndarray) -> np.ndarray:
        places = v.mean(1).argsort(axis=1).argsort(axis=1)
        return 1 - 6 * ((places - np.arange(8)) ** 2).sum(axis=1) / (8 * 63)

    low, high = jackknifed(values, ranks, smooth=False)
    np.testing.assert_allclose((low + high) / 2, ranks(values))
    assert held((low, high), 1.0) > 0.91 > held(jackknifed(values, ranks), 1.0)
    medians = rng.lognormal(size=(1000, 200))
    assert held(jackknifed(medians, lambda v: np.median(v, axis=1), smooth=False), 1.0) > 0.87


def test_means_are_their_own_centres():
    values = np.random.default_rng(0).lognormal(size=(5, 40))
    low, high = jackknifed(values, lambda v: v.mean(1))
    np.testing.assert_allclose((low + high) / 2, values.mean(1))


def test_the_centre_has_no_bias_and_the_width_stays():
    """Of the variance with n below it, whose bias is known: the centre has n - 1, and the width is
    of the jackknife.
    """
    values = np.random.default_rng(0).normal(size=(1, GROUPS))
    low, high = jackknifed(values, lambda v: v.var(1))
    assert (low + high) / 2 == pytest.approx(values.var(1, ddof=1))
    left_out = np.array([np.delete(values[0], place).var() for place in range(GROUPS)])
    error = np.sqrt(19 / 20 * ((left_out - left_out.mean()) ** 2).sum())
    assert (high - low) / 2 == pytest.approx(scipy.stats.t.ppf(0.975, 19) * error)
