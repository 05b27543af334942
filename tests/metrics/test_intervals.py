"""The intervals, against textbooks, scipy and simulation."""

import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from analysis_lib.metrics.intervals import jackknife_interval, ratio_interval, seed_interval, wilson


def test_the_interval_is_that_of_student_for_a_mean():
    """For a mean of one value a group, the jackknife is the textbook interval."""
    values = np.random.default_rng(0).normal(5, 2, 20)
    left_out = (values.sum() - values) / 19
    low, high = jackknife_interval(np.array(values.mean()), left_out)
    # Student's t with 19 degrees of freedom, from a printed table.
    reach = 2.093 * values.std(ddof=1) / math.sqrt(20)
    assert (float(low), float(high)) == pytest.approx((values.mean() - reach, values.mean() + reach), abs=1e-3)


def test_one_draw_has_no_interval():
    assert seed_interval([2.0])[0] == 2
    assert np.isnan(seed_interval([2.0])[1:]).all()


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
