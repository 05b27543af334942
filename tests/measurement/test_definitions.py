"""What makes two metrics the same, and what does not."""

import importlib
import sys
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


# What leads to code: each calls ``inner``, whose code changes.
WAYS = {
    "functools.cache": "import functools\n@functools.cache\ndef helper(x):\n    return inner(x)\n",
    "functools.lru_cache": "import functools\n@functools.lru_cache(3)\ndef helper(x):\n    return inner(x)\n",
    "functools.wraps": (
        "import functools\ndef wrapper(f):\n    @functools.wraps(f)\n    def g(x):\n        return f(x)\n    return g\n"
        "@wrapper\ndef helper(x):\n    return inner(x)\n"
    ),
    "functools.partial": "import functools\nhelper = functools.partial(inner)\n",
    "a bound method": "class C:\n    def f(self, x):\n        return inner(x)\nhelper = C().f\n",
    "a class method": "class C:\n    @classmethod\n    def f(cls, x):\n        return inner(x)\nhelper = C.f\n",
    "a static method": "class C:\n    @staticmethod\n    def f(x):\n        return inner(x)\nhelper = C.f\n",
    "functools.singledispatch": (
        "import functools\n@functools.singledispatch\ndef helper(x):\n    return x\n"
        "@helper.register\ndef _(x: int):\n    return inner(x)\n"
    ),
    "functools.singledispatchmethod": (
        "import functools\nclass C:\n    @functools.singledispatchmethod\n    def f(self, x):\n"
        "        return inner(x)\nhelper = C().f\n"
    ),
    "slots": (
        "from dataclasses import dataclass\n@dataclass(slots=True)\nclass C:\n    by: int = 1\n"
        "    def __call__(self, x):\n        return inner(x)\nhelper = C()\n"
    ),
    "a callable object": "class C:\n    def __call__(self, x):\n        return inner(x)\nhelper = C()\n",
    "a table of functions": "TABLE = {'a': inner}\ndef helper(x):\n    return TABLE['a'](x)\n",
    "an object of another library": (
        "from sklearn.preprocessing import FunctionTransformer\nT = FunctionTransformer(inner)\n"
        "def helper(x):\n    return T.transform(x)\n"
    ),
    "a property": (
        "class C:\n    @property\n    def f(self):\n        return inner\n\ndef helper(x):\n    return C().f(x)\n"
    ),
    "operator.methodcaller": (
        "import operator\nclass C:\n    def f(self):\n        return inner(1)\nTHE = C()\n"
        "def helper(x):\n    return operator.methodcaller('f')(THE)\n"
    ),
}


def known(way: str, inner: str) -> str | None:
    """What a metric is known by whose helper leads to other code in some way; None if it is not kept."""
    code = CODE.replace("def helper(x):\n    return x * FACTOR\n", f"def inner(x):\n    return {inner}\n\n{WAYS[way]}")
    names = {"__name__": "not_imported"}
    exec(code, names)
    try:
        return definition_hash(names["Mine"](1))
    except AnalysisError:
        return None


@pytest.mark.parametrize("way", WAYS)
def test_code_is_followed_or_what_it_gives_is_not_kept(way):
    before, after = known(way, "x + 1"), known(way, "x + 2")
    assert before is None or before != after
    assert known(way, "x + 1") == before


@pytest.mark.parametrize("way", sorted(WAYS.keys() - {"functools.singledispatch", "functools.singledispatchmethod"}))
def test_code_is_followed(way):
    assert known(way, "x + 1") is not None


def test_a_parameter_in_a_slot_is_one():
    code = CODE.replace("class Mine(metrics.Metric):\n", "class Mine(metrics.Metric):\n    __slots__ = ('p',)\n")
    names = {"__name__": "not_imported"}
    exec(code, names)
    assert definition_hash(names["Mine"](1)) != definition_hash(names["Mine"](2))


def test_modules_of_ones_own_are_followed_through_others(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    hashes = []
    for inner in ("x + 1", "x + 2", "x + 1"):
        for name in ("own_inner", "own_outer"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        (tmp_path / "own_inner.py").write_text(f"def f(x):\n    return {inner}\n")
        (tmp_path / "own_outer.py").write_text("import own_inner\ndef g(x):\n    return own_inner.f(x)\n")
        code = CODE.replace("FACTOR = 2", "import own_outer").replace("x * FACTOR", "own_outer.g(x)")
        names = {"__name__": "not_imported"}
        exec(code, names)
        hashes.append(definition_hash(names["Mine"](1)))
    assert hashes[0] != hashes[1]
