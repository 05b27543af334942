"""Numbers computed from tables: of several, of the best of them, of ratios, with intervals over
groups of texts.
"""

import math
from collections.abc import Callable, Mapping

import numpy as np
import pandas as pd
import pytest

from analysis_lib.errors import AnalysisError
from analysis_lib.measurement import Chosen, Ratio, Tables, largest
from analysis_lib.measurement.tables import Report
from analysis_lib.metrics.intervals import mean_interval

TABLE = Mapping[str, pd.DataFrame]
SIZES = dict.fromkeys(("width", "heads", "key_heads", "head_width"), 2)


class Means:
    """A metric of one text per group: the mean of each layer's values."""

    name = "means"

    def __init__(self, values: np.ndarray):
        self.values = values

    def table(self) -> pd.DataFrame:
        return self.without()

    def leaving_out(self) -> Callable[..., pd.DataFrame]:
        return self.without

    def without(self, *groups: int) -> pd.DataFrame:
        kept = np.delete(self.values, groups, axis=0)
        return pd.DataFrame({"layer": range(kept.shape[1]), "value": kept.mean(axis=0)})

    def occupied_groups(self) -> range:
        return range(len(self.values))


def tables(values: np.ndarray, texts: str = "a") -> Tables:
    return Tables(
        [Means(np.asarray(values, dtype=float))], Report(layers=[SIZES]), {"data_sha256": texts}
    )


def by_layer(t: TABLE) -> pd.Series:
    return t["means"].set_index("layer")["value"]


def test_the_largest_is_chosen_on_even_groups_and_judged_on_odd_ones():
    random = np.random.default_rng(0)
    values = random.normal(0, 0.1, (20, 3))
    values[::2, 1] += 1
    values[:, 2] += 0.4
    found = tables(values).intervals({"some": largest(by_layer), "every": by_layer})
    assert found["some"].row == pytest.approx(mean_interval(values[1::2, 1]).row)
    assert found["some"].draws == 10
    # Not so those beside it, which nobody chose.
    np.testing.assert_allclose(
        [one.row for one in found["every"]], [mean_interval(v).row for v in values.T]
    )


def test_the_largest_of_noise_is_not_above_it():
    """In draws in which no layer differs, the maximum lies above zero on average, the chosen one
    around it.
    """
    draws = [tables(values) for values in np.random.default_rng(0).normal(0, 1, (12, 20, 12))]
    chosen = [drawn.interval(largest(by_layer)) for drawn in draws]
    assert np.mean([by_layer(drawn).max() for drawn in draws]) > 0.3
    assert abs(np.mean([one.value for one in chosen])) < 0.15
    assert [one.side(0) for one in chosen].count("undecided") >= 11


def test_of_a_table_the_column_with_the_largest_least_is_chosen_and_all_of_it_judged():
    values = np.tile([[3.0, 0.0], [1.0, 2.0]], (10, 1)) + np.linspace(0, 0.1, 20)[:, None]

    def columns(t: TABLE) -> pd.DataFrame:
        first, second = by_layer(t)
        return pd.DataFrame(
            {"steep": [first, second], "level": [1.5, 1.4], "missing": [math.nan, 9.0]}
        )

    # On even groups the first column is about 3 and 0, on odd ones 1 and 2.
    found = tables(values).interval(largest(columns))
    assert [one.value for one in found] == [1.5, 1.4]
    values[:, 1] += 2
    found = tables(values).interval(largest(columns))
    assert [one.value for one in found] == pytest.approx(values[1::2].mean(axis=0))


def test_without_halves_all_groups_choose_and_judge():
    values = np.array([[1.0, 5.0], [2.0, 4.0], [3.0, 6.5]])
    found = tables(values).interval(largest(by_layer))
    assert found.row == pytest.approx(mean_interval(values[:, 1]).row)
    assert found.draws == 3


def test_of_nothing_the_largest_is_none():
    found = tables(np.zeros((20, 2))).interval(largest(lambda t: by_layer(t) * math.nan))
    assert math.isnan(found.value)


def test_a_rule_of_ones_own_is_given_what_it_chose():
    values = np.random.default_rng(0).normal(0, 0.1, (20, 4)) + np.array([0.0, 3.0, 2.0, 1.0])
    rule = Chosen(
        number=lambda t, at: by_layer(t)[at[0]] - by_layer(t)[at[1]],
        choose=lambda t: [*by_layer(t).nlargest(2).index],
    )
    found = tables(values).interval(rule)
    assert found.row == pytest.approx(mean_interval(values[1::2, 1] - values[1::2, 2]).row)


@pytest.mark.parametrize(("shift", "there"), [(0.0, False), (5.0, True), (-5.0, True)])
def test_a_ratio_has_no_value_where_its_denominator_may_be_zero(shift, there):
    values = np.random.default_rng(1).normal(0, 1, (20, 2)) + np.array([3.0, shift])
    found = tables(values).interval(Ratio(by_layer))
    ratio = values[:, 0].mean() / values[:, 1].mean()
    assert found.value == pytest.approx(ratio if there else math.nan, nan_ok=True)
    assert math.isfinite(found.ci_low) == there
    if there:
        assert found.ci_low < ratio < found.ci_high


def test_a_ratio_over_zero_itself_has_no_value():
    found = tables(np.ones((20, 2))).interval(Ratio(lambda t: (by_layer(t)[0], 0.0)))
    assert math.isnan(found.value)


def test_what_no_text_can_change_has_no_interval():
    found = tables(np.random.default_rng(0).normal(size=(20, 2))).interval(
        lambda t: len(t["means"])
    )
    assert found.value == 2
    assert math.isnan(found.ci_low)


def test_what_is_particular_to_a_text_drops_out_of_a_difference():
    random = np.random.default_rng(0)
    texts, noise = random.normal(0, 5, (20, 1)), random.normal(0, 0.1, (20, 1))
    one, other = tables(texts + 1 + noise), tables(texts)
    found = one.interval(lambda a, b: by_layer(a)[0] - by_layer(b)[0], other)
    assert found.row == pytest.approx(mean_interval(1 + noise[:, 0]).row)
    with pytest.raises(AnalysisError, match="of different texts"):
        one.interval(lambda a, b: 0.0, tables(texts, "b"))


def test_halves_are_of_all_tables_that_are_given():
    """The layer is chosen where the first measurement leads the second most, on even groups."""
    first, second = np.zeros((20, 2)), np.zeros((20, 2))
    first[::2, 1], first[1::2, 1] = 2.0, np.linspace(0, 1, 10)
    found = tables(first).interval(largest(lambda a, b: by_layer(a) - by_layer(b)), tables(second))
    assert found.row == pytest.approx(mean_interval(np.linspace(0, 1, 10)).row)
