"""Every notebook of the book: how it is written, and that it runs in the smoke profile."""

import ast
import builtins
import os
import re
import subprocess
import sys
from pathlib import Path

import findings
import nbformat
import pages
import pandas as pd
import papermill
import pytest
from copying import analyse
from sphinx_external_toc.parsing import parse_toc_yaml

from analysis_lib import load_corpus, load_model
from analysis_lib.book.parameters import TYPES, notebook_parameters
from analysis_lib.capture import Settings
from analysis_lib.measurement.shards import make_shards, measure_shard
from analysis_lib.metrics import resolve
from analysis_lib.metrics.accumulator import KEY_TYPES

ROOT = Path(__file__).resolve().parents[2]
BOOK = ROOT / "book"
NAMES = sorted(
    path.relative_to(BOOK).with_suffix("").as_posix()
    for path in BOOK.rglob("*.ipynb")
    if ".ipynb_checkpoints" not in path.parts
)
every_notebook = pytest.mark.parametrize("name", NAMES)


def read(name: str) -> nbformat.NotebookNode:
    return nbformat.read(BOOK / f"{name}.ipynb", 4)


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def draws(cell: nbformat.NotebookNode) -> bool:
    return any("image/png" in output.get("data", {}) for output in cell.outputs)


def test_the_table_of_contents_lists_every_notebook_and_no_other_page():
    listed = {str(name) for name in parse_toc_yaml(ROOT / "_toc.yml")}
    assert set(NAMES) <= listed
    pages = {path.relative_to(BOOK).with_suffix("").as_posix() for path in BOOK.rglob("*.md")}
    assert listed == pages | set(NAMES)


@every_notebook
def test_is_tracked_without_outputs(name):
    for cell in code_cells(read(name)):
        assert not cell.outputs
        assert cell.execution_count is None


@every_notebook
def test_names_the_kernel_that_every_jupyter_has(name):
    assert read(name).metadata.kernelspec.name == "python3"


@every_notebook
def test_every_name_is_defined_outside_jupyter_too(name):
    known = {*dir(builtins), "__annotations__"}
    for cell in map(analyse, (cell.source for cell in code_cells(read(name)))):
        assert cell.reads <= known, f"{cell.reads - known} in {cell.source}"
        known |= cell.binds | cell.changes


@every_notebook
def test_opens_with_a_title(name):
    first = read(name).cells[0]
    assert first.cell_type == "markdown"
    assert first.source.startswith("# ")


@every_notebook
def test_declares_each_parameter_with_type_literal_and_comment(name):
    tagged = [c for c in code_cells(read(name)) if "parameters" in c.metadata.get("tags", [])]
    assert len(tagged) == 1
    for statement in ast.parse(tagged[0].source).body:
        assert isinstance(statement, ast.AnnAssign), ast.unparse(statement)
        assert ast.unparse(statement.annotation) in TYPES
        ast.literal_eval(statement.value)
    for parameter in papermill.inspect_notebook(str(BOOK / f"{name}.ipynb")).values():
        assert parameter["help"], f"{parameter['name']} has no comment"


def test_a_parameter_has_one_type_in_all_notebooks():
    types = {(p.name, p.type) for name in NAMES for p in notebook_parameters(BOOK / f"{name}.ipynb").values()}
    assert len(types) == len(dict(types))


@every_notebook
def test_cells_are_short(name):
    for cell in code_cells(read(name)):
        lines = cell.source.splitlines()
        assert len(lines) <= 15, lines[0]
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno - node.lineno < 5, f"{node.name} belongs in analysis_lib"


@every_notebook
def test_each_cell_of_code_follows_words(name):
    """Parameters and imports speak for themselves, and so does a cell that computes its words."""
    cells = read(name).cells
    first = next(i for i, c in enumerate(cells) if "import " in c.source and c.cell_type == "code")
    for before, cell in zip(cells[first:], cells[first + 1 :], strict=False):
        if cell.cell_type == "code" and "Markdown(" not in cell.source:
            assert before.cell_type == "markdown", cell.source.splitlines()[0]


@every_notebook
def test_closes_with_what_was_found(name):
    """The site also shows it under the title, so there is one such cell, and it is the last."""
    cells = read(name).cells
    tagged = [i for i, cell in enumerate(cells) if "found" in cell.metadata.get("tags", ())]
    assert tagged == [len(cells) - 1]
    assert cells[-2].source.startswith("## What we found")


@every_notebook
def test_each_figure_is_followed_by_words_on_what_is_seen(name):
    """Computed: they join the words for who cannot see it."""
    roles = [
        "figure" if cell.metadata.get("mystnb", {}).get("figure") else "seen" if pages.has_tag(cell, pages.SEEN) else ""
        for cell in read(name).cells
    ]
    shown = [role for role in roles if role]
    assert shown == ["figure", "seen"] * (len(shown) // 2)


@every_notebook
def test_what_was_found_begins_with_a_sentence(name, smoke_site):
    executed = nbformat.read(ROOT / "_build" / "executed" / "smoke" / f"{name}.ipynb", 4)
    title, rest = findings.headline(findings.found(executed))
    assert 3 <= len(title.split()) <= 20, title
    assert rest
    assert not set("`{}*_") & set(title), title


@every_notebook
def test_runs_in_the_smoke_profile(name, smoke_site):
    executed = nbformat.read(ROOT / "_build" / "executed" / "smoke" / f"{name}.ipynb", 4)
    for cell in code_cells(executed):
        assert cell.execution_count is not None
        assert not [output for output in cell.outputs if output.output_type == "error"]


@every_notebook
def test_each_figure_has_a_name_a_caption_and_words_for_who_cannot_see_it(name, smoke_site):
    executed = nbformat.read(ROOT / "_build" / "executed" / "smoke" / f"{name}.ipynb", 4)
    figures = [cell for cell in code_cells(executed) if draws(cell)]
    assert figures
    for cell in figures:
        options = cell.metadata.get("mystnb", {})
        assert options.get("figure", {}).get("name", "").startswith("fig-"), cell.source
        assert options["figure"].get("caption"), cell.source
        assert options.get("image", {}).get("alt"), cell.source
        # A gallery shows them one by one.
        assert not re.search(
            r"figure (before|above)|(first|same) figure|same way|as above", options["figure"]["caption"]
        )


JUPYTER = "from nbclient.cli import main; main()"
SMALL = {"data": "news", "limit": "20"}


@pytest.mark.parametrize("folder", [ROOT, BOOK / "outliers"], ids=["root", "own"])
def test_runs_with_papermill_as_it_is(folder, tmp_path):
    notebook, out = BOOK / "outliers" / "attention.ipynb", tmp_path / "out.ipynb"
    parameters = [part for name, value in SMALL.items() for part in ("-p", name, value)]
    command = [sys.executable, "-m", "papermill", os.path.relpath(notebook, folder), out, *parameters]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    assert any(draws(cell) for cell in nbformat.read(out, 4).cells if cell.cell_type == "code")


def test_runs_with_jupyter_execute_in_any_folder(tmp_path):
    """Small: its command takes no parameters."""
    notebook = read("outliers/attention")
    cell = next(cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", []))
    cell.source += '\ndata, limit = "news", 20'
    nbformat.write(notebook, tmp_path / "attention.ipynb")
    command = [sys.executable, "-P", "-c", JUPYTER, "attention.ipynb", "--output=out.ipynb"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    assert any(draws(cell) for cell in nbformat.read(tmp_path / "out.ipynb", 4).cells if cell.cell_type == "code")


@pytest.mark.parametrize("name", ["minilm", "smollm2-135m"])
def test_the_formula_for_what_is_merged_is_that_of_the_sums(name):
    """What it leaves out are counts."""
    (cell,) = (cell for cell in code_cells(read("scale")) if "def numbers" in cell.source)
    defined = {"pd": pd, "KEY_TYPES": KEY_TYPES}
    exec(cell.source, defined)
    model = load_model(name)
    shard, *_ = make_shards(model, load_corpus("news", limit=2), resolve("all"), Settings())
    sums, report = measure_shard(shard, model)
    held = sum(found.values[0].nbytes for by_key in sums.values() for found in by_key.values())
    predicted = 8 * defined["numbers"](pd.DataFrame(report.layers).fillna(0)).to_numpy().sum()
    assert 0 < held - predicted < 0.02 * held
