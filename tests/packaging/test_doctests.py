"""The examples in the library's docstrings are true."""

import doctest
import importlib
import pkgutil

import pytest

import analysis_book
import analysis_lib

MODULES = ["analysis_lib", "analysis_book"]
for package in (analysis_lib, analysis_book):
    for _, name, _ in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not name.endswith("__main__"):
            MODULES.append(name)


@pytest.mark.parametrize("name", ["copying", *MODULES])
def test_examples(name, capsys):
    # The package's attribute `measure` is the function, so the module comes from the import system.
    results = doctest.testmod(importlib.import_module(name))
    assert results.failed == 0, capsys.readouterr().out


def test_there_are_examples():
    finder = doctest.DocTestFinder()
    modules = [importlib.import_module(name) for name in MODULES]
    assert sum(bool(test.examples) for module in modules for test in finder.find(module)) >= 10
