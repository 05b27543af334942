"""What a measurement is known by: versions where it ships, texts of code and parameters where it is
kept.
"""

import linecache
import os
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest

from analysis_lib import AnalysisError, metrics
from analysis_lib.measurement import versions
from analysis_lib.measurement.versions import formulas, is_current, metric_identity

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

    def rows(self, sums):
        return sums
"""
CHANGES = [
    ("FACTOR = 2", "FACTOR = 3"),
    ("x * FACTOR", "x + FACTOR"),
    ("return sums", "return 100 * sums"),
    ('"query", "key"', '"query"'),
    ("self.p = p", "self.p = abs(p)"),
]


def in_notebook(code: str) -> type:
    """The class of a cell, whose lines can be looked up as IPython lets one look them up."""
    cell = f"<cell {hash(code)}>"
    linecache.cache[cell] = (len(code), None, code.splitlines(keepends=True), cell)
    names = {"__name__": "a_notebook"}
    exec(compile(code, cell, "exec"), names)
    return names["Mine"]


@pytest.mark.parametrize(("old", "new"), CHANGES)
def test_a_changed_cell_is_another_metric(old, new):
    assert metric_identity(in_notebook(CODE.replace(old, new))(1)) != metric_identity(
        in_notebook(CODE)(1)
    )
    assert metric_identity(in_notebook(CODE)(1)) == metric_identity(in_notebook(CODE)(1))


@pytest.mark.parametrize(("old", "new"), CHANGES)
def test_a_changed_file_is_another_metric(old, new, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    identities = []
    for name, code in {
        "mine_before": CODE,
        "mine_after": CODE.replace(old, new),
        "mine_again": CODE,
    }.items():
        (tmp_path / f"{name}.py").write_text(code)
        identities.append(metric_identity(__import__(name).Mine(1)))
    assert identities[0] != identities[1]
    assert identities[0] == identities[2]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 2),
        (np.arange(3), np.arange(3.0)),
        ({"a": 1}, {"a": 2}),
        ([1, 2], [2, 1]),
        ({1, 2}, {1, 3}),
    ],
)
def test_other_parameters_are_another_metric(one, other):
    kind = in_notebook(CODE)
    assert metric_identity(kind(one)) != metric_identity(kind(other))
    assert metric_identity(kind(one)) == metric_identity(kind(one))


def test_the_order_of_a_set_does_not_count():
    kind = in_notebook(CODE)
    assert metric_identity(kind({"a", "b", "c"})) == metric_identity(kind({"c", "b", "a"}))
    assert metric_identity(metrics.Isotropy(["query", "key"])) == metric_identity(
        metrics.Isotropy(["key", "query"])
    )


def test_a_metric_is_the_same_in_every_process():
    """Whatever the seed of Python's own hashes: with 1 and 3, frozen sets have other orders."""
    code = "from analysis_lib import metrics\nfrom analysis_lib.measurement.versions import metric_identity\n"
    code += "print(metric_identity(metrics.Isotropy(['query', 'key'])))"
    printed = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "3")
    ]
    assert printed[0] == printed[1] != ""


@pytest.mark.parametrize("parameter", [threading.Lock(), lambda x: x])
def test_what_has_no_lasting_form_is_refused(parameter):
    with pytest.raises(AnalysisError, match="plain parameters"):
        metric_identity(in_notebook(CODE)(parameter))


def test_a_class_without_a_source_is_refused():
    names = {"__name__": "not_imported"}
    exec(textwrap.dedent(CODE), names)
    with pytest.raises(AnalysisError, match="put it into a file"):
        metric_identity(names["Mine"](1))


def test_versions_of_the_library_are_those_of_its_metrics(monkeypatch):
    monkeypatch.setattr(metrics.Anisotropy, "version", 7)
    monkeypatch.setattr(versions.capture, "VERSION", 3)
    asked = [metrics.Anisotropy(), metrics.Isotropy(["query"])]
    today = formulas(asked)
    assert (today["capture"], today["intervals"]) == (3, versions.intervals.VERSION)
    assert today["metrics"] == {
        "anisotropy": {"version": 7, "parameters": {}},
        "isotropy": {"version": metrics.Isotropy.version, "parameters": {"needs": ["query"]}},
    }
    assert metric_identity(metrics.Anisotropy())[1] == "7"


@pytest.mark.parametrize("changed", ["capture", "intervals", "metric", "more", "nothing"])
def test_a_recording_of_other_versions_is_not_current(changed):
    today = {"trials": 1, **formulas([metrics.Anisotropy(), metrics.MeanVector()])}
    recorded = {**today, "metrics": {**today["metrics"]}}
    if changed == "metric":
        recorded["metrics"]["anisotropy"] = {"version": 0, "parameters": {}}
    elif changed == "more":
        recorded["vanished"] = 1
    elif changed != "nothing":
        recorded[changed] = 0
    assert is_current({"formulas": recorded}, today) == (changed == "nothing")


def test_a_recording_without_intervals_or_with_fewer_tables_is_current():
    today = formulas([metrics.Anisotropy(), metrics.MeanVector()])
    recorded = formulas([metrics.MeanVector()])
    del recorded["intervals"]
    assert is_current({"formulas": recorded}, today)
    assert not is_current({}, today)
    assert not is_current({"sources": "a hash"}, today)
