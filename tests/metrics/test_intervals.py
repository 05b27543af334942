"""The intervals, against textbooks, scipy and simulation."""

import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from analysis_lib.metrics.intervals import (
    holm,
    jackknife_interval,
    mean_interval,
    ratio_interval,
    seed_and_unit_interval,
    seed_interval,
    two_sided_p,
    wilson,
)


def test_the_interval_is_that_of_student_for_a_mean():
    """For a mean of one value a group, the jackknife is the textbook interval."""
    values = np.random.default_rng(0).normal(5, 2, 20)
    left_out = (values.sum() - values) / 19
    low, high = jackknife_interval(np.array(values.mean()), left_out)
    # Student's t with 19 degrees of freedom, from a printed table.
    reach = 2.093 * values.std(ddof=1) / math.sqrt(20)
    assert (float(low), float(high)) == pytest.approx((values.mean() - reach, values.mean() + reach), abs=1e-3)


def test_one_draw_has_no_interval():
    assert mean_interval([2.0])[0] == 2
    assert np.isnan(mean_interval([2.0])[1:]).all()


@given(st.integers(1, 2000), st.floats(0, 1))
def test_wilson_is_scipys(items, share):
    correct = round(share * items)
    wanted = scipy.stats.binomtest(correct, items).proportion_ci(method="wilson")
    assert wilson(correct, items) == pytest.approx((wanted.low, wanted.high), abs=1e-6)


def test_the_interval_of_a_ratio_holds_it_nineteen_times_in_twenty():
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(1000):
        sizes = rng.integers(5, 50, 200).astype(float)
        _, low, high = ratio_interval(sizes * rng.gamma(4, 0.5, 200), sizes)
        held += low < 2.0 < high
    assert 0.92 < held / 1000 < 0.97


def test_fewer_than_five_seeds_have_no_interval():
    for count in (1, 2, 4):
        mean, *ends = seed_interval([*map(float, range(count))])
        assert mean == (count - 1) / 2
        assert np.isnan(ends).all()
    assert seed_interval([0.0, 1.0, 2.0, 3.0, 4.0]) == mean_interval([0.0, 1.0, 2.0, 3.0, 4.0])


def test_the_p_value_is_students_or_normal_on_the_side_of_the_bound():
    values = np.random.default_rng(0).normal(0.4, 1, 7)
    expected = scipy.stats.ttest_1samp(values, 0).pvalue
    assert two_sided_p(*mean_interval(values), 0.0, 7.0) == pytest.approx(expected)
    assert two_sided_p(1.96, 0.0, 3.92, 0.0) == pytest.approx(0.05, abs=1e-4)
    # Of a crooked interval, the side that faces the bound counts.
    assert two_sided_p(1.0, 0.5, 9.0, 0.0) == pytest.approx(2 * scipy.stats.norm.sf(2 * 1.959964), rel=1e-5)
    assert math.isnan(two_sided_p(1.0, math.nan, math.nan, 0.0))
    assert two_sided_p(1.0, 1.0, 1.0, 0.0) == 0
    assert two_sided_p(0.0, 0.0, 0.0, 0.0) == 1


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_is_what_its_steps_say(p_values):
    raised, largest = [math.nan] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        raised[place] = largest
    assert holm(p_values).tolist() == pytest.approx(raised)


def test_seeds_and_texts_both_widen_an_interval():
    """A thousand draws of five seeds on one sample of texts: the joint interval covers the truth in about 95 %."""
    random, inside = np.random.default_rng(0), 0
    for _ in range(1000):
        values = random.normal(0, 0.3) + random.normal(0, 0.3, 5)
        _, low, high = seed_and_unit_interval([(value, value - 0.588, value + 0.588) for value in values])
        inside += low <= 0 <= high
    assert 0.94 < inside / 1000 < 0.995
