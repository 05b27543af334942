"""A wheel in an empty environment, with the newest of everything that its bounds allow: ``make
newest``.

It downloads some 1.5 GB and takes ten minutes, so it does not belong to the suite. PyTorch alone is
as pinned: on Linux, pip would bring gigabytes of CUDA with another one.
"""

import json
import os
import subprocess
import venv
from pathlib import Path

import nbformat
import pytest
from conftest import ROOT
from copying import scripts

pytestmark = pytest.mark.skipif(
    "ANALYSIS_LIB_NEWEST" not in os.environ, reason="takes long: make newest"
)
FEW = ("--limit", "50")


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory) -> Path:
    """The interpreter of an environment that holds the wheel, and what pip finds for it."""
    home = tmp_path_factory.mktemp("newest")
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    pinned = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line.startswith("torch==")
    ]
    subprocess.run([*pip, *pinned], check=True)
    before = version(python, "torch")
    subprocess.run([*pip, f"{wheel}[all]"], check=True)
    assert version(python, "torch") == before
    return python


def version(python: Path, name: str) -> str:
    code = f"import importlib.metadata; print(importlib.metadata.version({name!r}))"
    return subprocess.run(
        [python, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory) -> Path:
    """A folder outside the clone, where all that is run leaves its files."""
    return tmp_path_factory.mktemp("elsewhere")


def run(python: Path, elsewhere: Path, *arguments: str) -> str:
    """What a command prints, with a cache of its own."""
    ours = {name for name in os.environ if name.startswith("ANALYSIS_LIB_")} | {"PYTHONPATH"}
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    environment["XDG_CACHE_HOME"] = str(elsewhere / "cache")
    done = subprocess.run(
        [python, *arguments],
        cwd=elsewhere,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_everything_fits(python):
    subprocess.run([python, "-m", "pip", "check"], check=True)


def test_measure(python, elsewhere):
    command = ("-m", "analysis_lib", "measure", "--model", "minilm", "--data", "wikipedia", *FEW)
    assert "wrote 11 tables" in run(python, elsewhere, *command, "--out", "tables")


def test_run(python, elsewhere):
    run(
        python,
        elsewhere,
        "-m",
        "analysis_lib",
        "run",
        "anisotropy/layers",
        "-p",
        "limit",
        "20",
        "--out",
        "executed",
    )
    assert (elsewhere / "executed" / "anisotropy-layers.ipynb").is_file()


def test_report(python, elsewhere):
    command = (
        "-m",
        "analysis_lib",
        "report",
        "minilm",
        "smollm2-135m",
        "--data",
        "wikipedia",
        *FEW,
    )
    run(python, elsewhere, *command, "--out", "report")
    found = json.loads((elsewhere / "report" / "report.json").read_text(encoding="utf-8"))
    assert len(found["models"]) == 2
    assert (elsewhere / "report" / "index.html").is_file()


def test_a_copied_script(python, elsewhere):
    """The last cell of a page, with all that it needs: its finding in words, and no figure."""
    notebook = nbformat.read(ROOT / "book" / "anisotropy" / "layers.ipynb", nbformat.NO_CONVERT)
    cells = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    script = elsewhere / "copied.py"
    script.write_text(
        scripts(cells)[-1].replace("limit: int = 1500", "limit: int = 50"), encoding="utf-8"
    )
    printed = run(python, elsewhere, str(script))
    assert "cosine" in printed
    assert "object at" not in printed
