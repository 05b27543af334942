"""All that names the environment agrees: pyproject, constraints, conda, what is installed."""

import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from analysis_lib import __version__

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pins() -> dict[str, Requirement]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found = [Requirement(line) for line in lines if line.strip() and not line.startswith("#")]
    return {canonicalize_name(pin.name): pin for pin in found}


EXTRAS = PROJECT["optional-dependencies"]
# What is installed with the library, and with each of its extras; one extra may name others.
WITH_EXTRAS = [*PROJECT["dependencies"]]
for extra in ("adapters", "book", "cluster", "packages"):
    WITH_EXTRAS += [line for line in EXTRAS[extra] if not line.startswith("analysis_lib[")]
DIRECT = [Requirement(line).name for line in [*WITH_EXTRAS, *EXTRAS["test"]]]


def test_the_library_alone_needs_thirteen_packages():
    assert len(PROJECT["dependencies"]) == 13


def test_an_extra_has_all_of_them():
    (everything,) = EXTRAS["all"]
    assert Requirement(everything).extras == EXTRAS.keys() - {"all", "lab", "test"}


@pytest.mark.parametrize("name", DIRECT)
def test_direct_dependency_is_pinned_to_what_is_installed(name):
    pin = pins()[canonicalize_name(name)]
    assert pin.specifier.contains(importlib.metadata.version(name))


def test_constraints_are_exact_and_hold_for_all_that_is_installed():
    """What is installed for JupyterLab alone need not be there."""
    for name, pin in pins().items():
        (specifier,) = pin.specifier
        assert specifier.operator == "==", f"{name} is not pinned exactly"
    versions = {
        canonicalize_name(found.name): found.version for found in importlib.metadata.distributions()
    }
    for name in pins().keys() & versions.keys():
        assert pins()[name].specifier.contains(versions[name]), name


def test_jupyterlab_is_pinned():
    (lab,) = EXTRAS["lab"]
    assert canonicalize_name(lab) in pins()


# What counts by the calendar, or has a new major version every few months: none of them broke us
# yet.
CALENDAR = {"distributed", "packaging", "pillow", "pyarrow"}


def next_major_version(version: str) -> str:
    return f"{Version(version).major + 1}.0"


@pytest.mark.parametrize("line", WITH_EXTRAS)
def test_the_next_major_version_of_a_dependency_is_left_out(line):
    dependency = Requirement(line)
    pinned = next(iter(pins()[canonicalize_name(dependency.name)].specifier)).version
    assert dependency.specifier.contains(pinned)
    if dependency.name in CALENDAR:
        assert not dependency.specifier
    else:
        assert not dependency.specifier.contains(next_major_version(pinned))
        assert not dependency.specifier.contains("0.0.1"), (
            "an environment may hold one that is too old"
        )


def test_jupyter_book_is_the_one_that_builds_the_site():
    (dependency,) = [
        Requirement(line) for line in EXTRAS["book"] if line.startswith("jupyter-book")
    ]
    assert dependency.specifier.contains("1.0.4.post1")
    assert not dependency.specifier.contains("2.1.7")


def test_the_bounds_of_a_wheel_are_those_of_what_is_installed():
    """What pip says of an environment in which everything fits."""
    for line in WITH_EXTRAS:
        dependency = Requirement(line)
        assert dependency.specifier.contains(importlib.metadata.version(dependency.name)), line


def test_what_only_tests_need_has_its_versions_in_the_constraints_alone():
    for line in EXTRAS["test"]:
        assert not Requirement(line).specifier, line


def test_conda_uses_the_same_files():
    pip = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"][-1]["pip"]
    assert pip == ["-c constraints.txt", "-e .[all,test]"]


def test_python_is_the_same_everywhere():
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    conda = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    assert PROJECT["requires-python"].startswith(f">={version},")
    assert f"python={version}" in conda
    assert f"PYTHON ?= python{version}\n" in (ROOT / "Makefile").read_text()


def test_packages_are_pinned_by_hash():
    lines = (ROOT / "data" / "packages.txt").read_text().splitlines()
    for line in [line for line in lines if line.strip() and not line.startswith("#")]:
        assert re.fullmatch(
            r"[\w.-]+==[\w.]+ --hash=sha256:[0-9a-f]{64}(  # (source|on demand))?", line
        ), line


def test_the_citation_is_of_this_version_and_licence():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (citation["version"], citation["license"]) == (__version__, PROJECT["license"])
    assert citation["cff-version"] == "1.2.0"
    assert all(citation[field] for field in ("message", "title", "authors"))


def test_what_the_commands_of_the_readme_write_is_not_tracked():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    folders = {out.partition("/")[0] for out in re.findall(r"--out (\S+)", readme)}
    assert {"results", "reports", "runs"} <= folders
    for folder in (*folders, "build"):
        assert f"/{folder}/" in ignored


def test_the_readme_names_the_pinned_version_of_pytorch():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (version,) = {*re.findall(r"torch(==\S+)", readme)}
    assert str(pins()["torch"].specifier) == version
