"""Packages whose names are imported when they are first used."""

import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

OF_LIBRARY = "measurement", "metrics", "models"
OF_BOOK = "build", "figures", "training"
LAZY = (
    "analysis_lib",
    "analysis_book",
    *(f"analysis_lib.{name}" for name in OF_LIBRARY),
    *(f"analysis_book.{name}" for name in OF_BOOK),
)


@pytest.mark.parametrize("package", LAZY)
def test_every_name_of_the_package_is_found(package):
    module = importlib.import_module(package)
    names = [name for name in dir(module) if not name.startswith("_")]
    assert len(names) > 5
    for name in names:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nowhere'"):
        module.nowhere  # noqa: B018


@pytest.mark.parametrize("package", LAZY)
def test_no_name_is_that_of_a_module_which_would_take_its_place(package):
    module = importlib.import_module(package)
    modules = {found.name for found in pkgutil.iter_modules(module.__path__)}
    late = importlib.import_module("analysis_lib.lazy").homes(package)
    assert not [name for name in modules if late.get(name, package) != package]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["models"],
        ["datasets"],
        ["metrics"],
        ["cache"],
        ["measure", "--modle", "minilm"],
        ["run", "--list"],
        ["run", "outliers/attention", "--parameters"],
        ["report", "--help"],
    ],
)
def test_what_needs_no_model_imports_no_torch(arguments):
    code = "import sys, contextlib\nfrom analysis_lib.cli import main\n"
    code += "with contextlib.suppress(SystemExit):\n    main(sys.argv[1:])\n"
    code += "assert not {'torch', 'transformers', 'pandas'} & {*sys.modules}"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_pages_of_the_site_are_built_without_torch():
    folder = Path(__file__).parents[1] / "book" / "_ext"
    code = f"import sys\nsys.path.insert(0, {str(folder)!r})\n"
    code += f"import {', '.join(path.stem for path in folder.glob('*.py'))}\n"
    code += "assert not {'torch', 'transformers'} & {*sys.modules}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_worker_does_not_wait_for_parts_of_scipy_that_it_does_not_use():
    # They take half a second, an eighth of what a worker takes to start: `import scipy` loads a
    # part when it is used.
    code = "import sys, analysis_lib.measurement.shards; print(sorted({'scipy.stats', 'scipy.signal'} & {*sys.modules}))"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "[]\n"
    )
