"""The intervals, against textbooks, scipy and simulation."""

import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from analysis_book.papers.claims import holm
from analysis_lib.metrics.intervals import (
    Estimate,
    correlation,
    jackknife_interval,
    least,
    mean_interval,
    ratio,
    seed_and_unit_interval,
    seed_interval,
    share,
)


def test_the_interval_is_that_of_student_for_a_mean():
    """For a mean of one value a group, the jackknife is the textbook interval."""
    values = np.random.default_rng(0).normal(5, 2, 20)
    left_out = (values.sum() - values) / 19
    low, high = jackknife_interval(np.array(values.mean()), left_out)
    # Student's t with 19 degrees of freedom, from a printed table.
    reach = 2.093 * values.std(ddof=1) / math.sqrt(20)
    assert (float(low), float(high)) == pytest.approx(
        (values.mean() - reach, values.mean() + reach), abs=1e-3
    )


def test_one_draw_has_no_interval():
    found = mean_interval([2.0])
    assert found.value == 2
    assert np.isnan(found.row[1:]).all()


@pytest.mark.parametrize("form", ["z.2f", ".0%", ".1e", ""])
def test_an_estimate_prints_its_numbers_in_one_form(form):
    found = Estimate(0.25, 0.125, 0.5)
    value, low, high = (format(number, form or "z.2f") for number in found.row)
    assert format(found, form) == f"{value} [{low}, {high}]"
    assert format(Estimate(0.25), form) == value
    assert str(Estimate(math.nan)) == "none"


def test_an_interval_of_no_width_is_none():
    """What was counted does not depend on the units: it has no p."""
    counted = Estimate(0.9, 0.9, 0.9, 20)
    assert np.isnan(counted.row[1:]).all()
    assert math.isnan(counted.p(0.5))
    assert counted.side(0.5) == ""


@given(st.integers(1, 2000), st.floats(0, 1), st.floats(0.01, 0.99))
def test_wilson_is_scipys_and_its_p_says_what_the_interval_does(items, part, bound):
    found = share(round(part * items), items)
    wanted = scipy.stats.binomtest(round(part * items), items).proportion_ci(method="wilson")
    assert found.row[1:] == pytest.approx((wanted.low, wanted.high), abs=1e-6)
    inside = found.ci_low < bound < found.ci_high
    if min(abs(bound - end) for end in found.row[1:]) > 1e-6:
        assert (found.p(bound) > 0.05) == inside


def test_the_interval_of_a_ratio_holds_it_nineteen_times_in_twenty():
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(1000):
        sizes = rng.integers(5, 50, 200).astype(float)
        found = ratio(sizes * rng.gamma(4, 0.5, 200), sizes)
        held += found.ci_low < 2.0 < found.ci_high
    assert 0.92 < held / 1000 < 0.97


def test_fewer_than_five_seeds_have_no_interval():
    for count in (1, 2, 4):
        found = seed_interval([*map(float, range(count))])
        assert found.value == (count - 1) / 2
        assert np.isnan(found.row[1:]).all()
    assert seed_interval([0.0, 1.0, 2.0, 3.0, 4.0]) == mean_interval([0.0, 1.0, 2.0, 3.0, 4.0])


def test_the_p_value_is_students_or_normal():
    values = np.random.default_rng(0).normal(0.4, 1, 7)
    assert mean_interval(values).p(0.0) == pytest.approx(scipy.stats.ttest_1samp(values, 0).pvalue)
    assert Estimate(1.96, 0.0, 3.92).p(0.0) == pytest.approx(0.05, abs=1e-4)
    assert math.isnan(Estimate(1.0).p(0.0))


@pytest.mark.parametrize("bound", [-2.0, 0.2, 0.9, 1.2, 3.0])
@pytest.mark.parametrize(("bias", "reach"), [(0.0, 1.0), (0.2, 0.5), (-0.2, 0.3)])
def test_the_p_value_says_what_an_interval_does_that_is_not_around_its_number(bias, reach, bound):
    found = Estimate(1.0, 1.0 - bias - reach, 1.0 - bias + reach, 20)
    assert found.centre == pytest.approx(1.0 - bias)
    if min(abs(bound - end) for end in found.row[1:]) > 1e-6:
        assert (found.p(bound) > 0.05) == (found.ci_low < bound < found.ci_high)
    # As that of Student's law around the centre.
    error = reach / scipy.stats.t.ppf(0.975, 19)
    assert found.p(bound) == pytest.approx(
        2 * scipy.stats.t.sf(abs(bound - found.centre) / error, 19), rel=1e-6
    )
    # The same number with the other sign, and one whose interval is cut at a limit, are no less
    # sure.
    assert (-found).p(-bound) == pytest.approx(found.p(bound))
    for cut in (found.within(1.0, 9.0), found.within(-9.0, 1.0)):
        assert cut.p(bound) == pytest.approx(found.p(bound))
    wider = found.wider(10)
    assert (wider.ci_low + wider.ci_high) / 2 == pytest.approx(found.centre)
    assert (wider.ci_high - wider.ci_low) / 2 == pytest.approx(
        scipy.stats.t.ppf(0.9975, 19) * error
    )


def test_seeds_whose_intervals_are_not_around_their_numbers_have_the_mean_of_the_centres():
    values = np.array([1.0, 2.0, 3.0, 4.0, 5.0])
    found = seed_and_unit_interval([Estimate(value, value - 1.5, value + 0.5) for value in values])
    around = seed_and_unit_interval([Estimate(value, value - 1.0, value + 1.0) for value in values])
    assert found.value == around.value == 3
    assert found.row[1:] == pytest.approx([end - 0.5 for end in around.row[1:]])


@pytest.mark.parametrize(("r", "items"), [(0.96, 7), (-0.5, 30), (0.1, 13)])
def test_the_p_value_of_a_correlation_is_on_the_scale_of_fisher(r, items):
    found = correlation(r, items)
    assert found.p(0.0) == pytest.approx(
        2 * scipy.stats.norm.sf(abs(math.atanh(r)) * math.sqrt(items - 3)), rel=1e-6
    )
    wanted = scipy.stats.norm.interval(0.95, math.atanh(r), 1 / math.sqrt(items - 3))
    assert found.row[1:] == pytest.approx([*map(math.tanh, wanted)], rel=1e-6)


def test_a_perfect_order_counts_as_the_next_one_below_it():
    perfect, next_to_it = correlation(1.0, 7, rank=True), 1 - 12 / (7**3 - 7)
    # The variance is that of a correlation of 1, the place that of the next order.
    assert math.atanh(perfect.ci_low) + math.atanh(perfect.ci_high) == pytest.approx(
        2 * math.atanh(next_to_it)
    )
    assert 0 < perfect.p(0.0) < 0.01
    assert np.isnan(correlation(0.9, 3).row[1:]).all()


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_is_what_its_steps_say(p_values):
    raised, largest = [math.nan] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        raised[place] = largest
    assert holm(p_values).tolist() == pytest.approx(raised)


def test_seeds_and_texts_both_widen_an_interval():
    """A thousand draws of five seeds on one sample of texts: the joint interval covers the truth in
    about 95 %.
    """
    random, inside = np.random.default_rng(0), 0
    for _ in range(1000):
        values = random.normal(0, 0.3) + random.normal(0, 0.3, 5)
        found = seed_and_unit_interval(
            [Estimate(value, value - 0.588, value + 0.588) for value in values]
        )
        inside += found.ci_low <= 0 <= found.ci_high
    assert 0.94 < inside / 1000 < 0.995


@pytest.mark.parametrize("truth", [[0.0] * 8, [0.0, 1.0, 1.0, 1.0], [0.0, 0.1, 0.2, 0.3]])
def test_the_least_of_several_lies_in_its_interval(truth):
    """In 95 % of draws or more, whether the numbers are alike or one is far below the others."""
    random, held, above = np.random.default_rng(0), 0, 0
    for _ in range(500):
        found = least([mean_interval(random.normal(mean, 1, 20)) for mean in truth])
        held += found.ci_low <= min(truth) <= found.ci_high
        above += found.ci_low > min(truth)
    assert held / 500 > 0.94
    assert above / 500 <= 0.035


def test_the_p_of_the_least_is_that_of_the_worst_above_its_bound_and_corrected_below():
    parts = [Estimate(0.5, 0.4, 0.6), Estimate(0.3, 0.1, 0.5), Estimate(0.9, 0.8, 1.0)]
    found = least(parts)
    assert found.row[:2] == (0.3, 0.1)
    assert found.p(0.05) == max(part.p(0.05) for part in parts)
    assert found.p(0.4) == pytest.approx(3 * parts[1].p(0.4))
    assert (found.p(0.11) < 0.05) == (found.ci_low > 0.11)
    assert np.isnan(least([*parts, Estimate(0.2)]).row[1:]).all()
    assert math.isnan(least([*parts, Estimate(math.nan)]).value)
