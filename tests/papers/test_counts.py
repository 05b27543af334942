"""Exact intervals of counts, against the tables of Clopper and Pearson and against scipy."""

import math

import pandas as pd
import pytest
from scipy import stats

from analysis_book.papers.counts import Settled, exact, pooled
from analysis_book.papers.maruta import head_shares
from analysis_lib.metrics.intervals import Estimate, least


@pytest.mark.parametrize(
    ("count", "items", "ends"),
    [
        # With all or none, the other end is (α/2)^(1/n) from 0, or from 1.
        (12, 12, (0.025 ** (1 / 12), 1)),
        (0, 12, (0, 1 - 0.025 ** (1 / 12))),
        # The table of Clopper and Pearson (1934) for 5 of 10.
        (5, 10, (0.187, 0.813)),
    ],
)
def test_the_interval_of_a_count_is_exact(count, items, ends):
    share = exact(count, items)
    assert share.row == pytest.approx((count / items, *ends), abs=5e-4)
    assert (-share).row == pytest.approx((-count / items, -ends[1], -ends[0]), abs=5e-4)


def test_the_p_of_a_count_is_twice_its_smaller_tail():
    assert exact(5, 5).p(0.5) == pytest.approx(2 / 32)
    assert (-exact(5, 5)).p(-0.5) == pytest.approx(2 / 32)
    assert exact(0, 12).p(0.5) == pytest.approx(2 / 2**12)
    assert exact(8, 10).p(0.5) == pytest.approx(2 * stats.binom.sf(7, 10, 0.5))
    assert exact(5, 10).p(0.5) == 1
    # It is below 0.05 where the interval leaves the bound out.
    for count in range(13):
        share = exact(count, 12)
        assert (share.p(0.5) < 0.05) == (share.side(0.5) != "undecided")


def test_several_counts_hold_at_once_at_a_higher_level():
    both = least([exact(12, 12), exact(11, 12)])
    assert both.value == 11 / 12
    assert both.ci_low == exact(11, 12).ci_low
    assert both.ci_high == exact(11, 12, level=0.975).ci_high
    assert both.p(0.5) == exact(11, 12).p(0.5)


def by_seed(*shares: int, heads: int = 4) -> pd.Series:
    rows = [(seed, head < share) for seed, share in enumerate(shares) for head in range(heads)]
    seeds, counted = zip(*rows, strict=True)
    return pd.Series(counted, pd.Index(seeds, name="seed"))


def test_seeds_that_agree_are_counted_together_and_others_are_not():
    assert pooled(by_seed(4, 4, 4, 4, 4)).row == exact(20, 20).row
    assert pooled(by_seed(2, 2, 2, 2, 2)).row == exact(10, 20).row
    differ = pooled(by_seed(4, 4, 4, 4, 3))
    spread = stats.t.ppf(0.975, 4) * stats.sem([1, 1, 1, 1, 0.75])
    assert differ.row == pytest.approx((0.95, 0.95 - spread, 0.95 + spread))
    # Four trainings decide nothing, and none is no number.
    assert math.isnan(pooled(by_seed(4, 4, 4, 4)).ci_low)
    assert math.isnan(pooled(pd.Series([], dtype=bool)).value)


def test_a_share_of_heads_has_its_exact_interval_where_no_text_changes_it():
    shares = head_shares(lambda tables: None, layers=3)
    varies = Estimate(0.75, 0.7, 0.8, 20)
    found = shares.judged([Estimate(1.0), varies, Estimate(math.nan), Estimate(36.0)])
    assert found[0].row == exact(36, 36).row
    assert found[1] is varies
    assert math.isnan(found[2].value)


def test_what_is_settled_lies_on_one_side():
    assert Settled(0.9).side(0.5) == "above"
    assert (-Settled(0.9)).side(-0.5) == "below"
    assert Settled(math.nan).side(0.5) == ""
    assert math.isnan(Settled(0.9).p(0.5))
