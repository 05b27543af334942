"""What makes two metrics the same, and what does not."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from analysis_lib import AnalysisError, metrics
from analysis_lib.measurement.definitions import definition_hash
from analysis_lib.metrics.accumulator import GroupSums

CODE = """
from analysis_lib import metrics

FACTOR = 2

def helper(x):
    return x * FACTOR

class Mine(metrics.Metric):
    name, needs = "mine", frozenset({"hidden", "query", "key"})

    def __init__(self, p):
        super().__init__()
        self.p = p

    def update(self, activations):
        self.add(("x",), helper(activations), activations)

    def points(self, sums):
        return sums
"""


def mine(old: str = "", new: str = "") -> Callable:
    """The class of ``CODE``, edited."""
    assert old in CODE
    names = {"__name__": "not_imported"}
    exec(CODE.replace(old, new) if old else CODE, names)
    return names["Mine"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("FACTOR = 2", "FACTOR = 3"),
        ("x * FACTOR", "x + FACTOR"),
        ("return sums", "return 100 * sums"),
        ('"query", "key"', '"query"'),
        ("self.p = p", "self.p = p\n        self.sums = {}"),
    ],
)
def test_other_code_is_another_metric(old, new):
    assert definition_hash(mine(old, new)(1)) != definition_hash(mine()(1))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("\nFACTOR", "\n\n# A comment.\nFACTOR"),
        ("helper(x):", 'helper(x):\n    "A docstring."'),
        ("points(self, sums):", 'points(self, sums):\n        "A docstring."'),
        ("FACTOR = 2", "FACTOR = 2\nunused = 3"),
    ],
)
def test_a_docstring_a_comment_or_what_it_does_not_use_change_nothing(old, new):
    assert definition_hash(mine(old, new)(1)) == definition_hash(mine()(1))


@pytest.mark.parametrize(
    ("one", "other"),
    [(1, 2), (1, 1.0), ("a", b"a"), ({"a": 1}, {"a": 2}), ([1, [2]], [1, 2]), (np.ones(2), np.ones(3)), (abs, len)],
)
def test_another_parameter_is_another_metric(one, other):
    assert definition_hash(mine()(one)) != definition_hash(mine()(other))
    assert definition_hash(mine()(one)) == definition_hash(mine()(one))


def test_the_order_of_a_set_and_what_was_summed_change_nothing():
    used = mine()({"a", "b", "c"})
    used.sums["x", 1] = GroupSums((0,), torch.ones(1, 3))
    assert definition_hash(used) == definition_hash(mine()({"c", "b", "a"}))


def test_metrics_of_the_library_differ_by_their_parameters():
    assert definition_hash(metrics.Isotropy(["query"])) != definition_hash(metrics.Isotropy())
    assert definition_hash(metrics.Isotropy(["query", "key"])) == definition_hash(metrics.Isotropy(["key", "query"]))
    assert definition_hash(metrics.MeanVector()) != definition_hash(metrics.Anisotropy())


@dataclass
class Options:
    """An object of one's own as a parameter."""

    norm: float


def test_an_object_of_ones_own_is_a_parameter():
    assert definition_hash(mine()(Options(1))) == definition_hash(mine()(Options(1)))
    assert definition_hash(mine()(Options(1))) != definition_hash(mine()(Options(2)))
    assert definition_hash(mine()(lambda x: x)) != definition_hash(mine()(lambda x: -x))


def test_what_has_no_lasting_form_is_refused():
    with pytest.raises(AnalysisError, match="plain parameters"):
        definition_hash(mine()(threading.Lock()))
