"""Notebooks of a few cells, and how to wait for another process."""

import ast
import subprocess
import sys
from pathlib import Path

import nbformat
import psutil
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

KERNEL = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
PARAMETERS = """\
layers: list = [1]  # the layers to show
limit: int = 10  # how many
scale: float = 1.0  # of the axis
name: str = "a"  # of the model
log: bool = False  # axis"""


def write(path: Path, *sources: str, parameters: str = PARAMETERS, tags: tuple = ()) -> Path:
    """A notebook with a title, a cell of parameters, and the given cells, the last one tagged."""
    cells = [new_markdown_cell(f"# {path.stem}")]
    cells += [new_code_cell(parameters, metadata={"tags": ["parameters"]})]
    cells += [new_code_cell(source) for source in sources]
    cells[-1].metadata.setdefault("tags", []).extend(tags)
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(new_notebook(cells=cells, metadata=KERNEL), path)
    return path


def outputs(path: Path) -> str:
    cells = nbformat.read(path, 4).cells
    return "".join(o.get("text", "") for c in cells for o in c.get("outputs", []))


def faults(folder: Path, rules: str) -> str:
    """What ruff says of the scripts of a folder, by rules that the project does not keep
    everywhere.
    """
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", rules, "-q", folder]
    return subprocess.run(ruff, capture_output=True, text=True, check=False).stdout


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def is_shown_by_jupyter_alone(source: str) -> bool:
    """Whether a cell ends in a value that Jupyter would show, and a script would not print."""
    last = ast.parse(source).body[-1]
    if not isinstance(last, ast.Expr):
        return False
    makes = ast.unparse(last.value.func) if isinstance(last.value, ast.Call) else ""
    return not makes or makes in (
        "figures.Table",
        "figures.TextTable",
        "figures.Slider",
        "Markdown",
    )
