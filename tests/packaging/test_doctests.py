"""The examples in the library's docstrings are true."""

import doctest
import importlib
import pkgutil

import pytest

import analysis_lib

MODULES = sorted(
    name
    for _, name, _ in pkgutil.walk_packages(analysis_lib.__path__, "analysis_lib.")
    if not name.endswith("__main__")
)


@pytest.mark.parametrize("name", ["analysis_lib", "copying", *MODULES])
def test_examples(name, capsys):
    # The package's attribute `measure` is the function, so the module comes from the import system.
    results = doctest.testmod(importlib.import_module(name))
    assert results.failed == 0, capsys.readouterr().out


def test_there_are_examples():
    finder = doctest.DocTestFinder()
    modules = [importlib.import_module(name) for name in MODULES]
    assert sum(bool(test.examples) for module in modules for test in finder.find(module)) >= 10
