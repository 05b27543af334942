"""Every notebook of the book: how it is written, and that it runs in the smoke profile."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import papermill
import pytest
from copying import scripts
from notebooks import figures as drawn
from notebooks import finding, tagged
from planted_notebooks import faults, is_shown_by_jupyter_alone
from sphinx_external_toc.parsing import parse_toc_yaml

from analysis_book.build.parameters import TYPES, notebook_parameters

ROOT = Path(__file__).resolve().parents[2]
BOOK = ROOT / "book"
# Those of reports, too.
NOTEBOOKS = sorted(path for path in BOOK.rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts)
NAMES = [
    path.relative_to(BOOK).with_suffix("").as_posix()
    for path in NOTEBOOKS
    if "analysis_book" not in path.parts
]
every_notebook = pytest.mark.parametrize("name", NAMES)


LOOPS = ast.For | ast.While | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


def read(name: str) -> nbformat.NotebookNode:
    return nbformat.read(BOOK / f"{name}.ipynb", 4)


def parsed(cell: nbformat.NotebookNode) -> ast.Module:
    return ast.parse(re.sub(r"^[%!].*$", "", cell.source, flags=re.MULTILINE))


def lines(*cells: nbformat.NotebookNode) -> int:
    """How many lines of the cells are not blank."""
    return sum(bool(line.strip()) for cell in cells for line in cell.source.splitlines())


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def draws(cell: nbformat.NotebookNode) -> bool:
    """Whether a cell shows a figure; a slider, which has its own caption, is HTML, too."""
    shown = [output.get("data", {}) for output in cell.outputs]
    return any("image/png" in data and "text/html" not in data for data in shown)


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
def test_every_name_is_defined_outside_jupyter_too(name, tmp_path):
    (tmp_path / "notebook.py").write_text("\n".join(cell.source for cell in code_cells(read(name))))
    assert not faults(tmp_path, "F821")


@every_notebook
def test_a_copied_cell_brings_no_name_that_it_does_not_use(name, tmp_path):
    cells = code_cells(read(name))
    for number, script in enumerate(scripts([cell.source for cell in cells])):
        # Imports and what needs nothing are there for the cells below them.
        imports = any(
            isinstance(node, ast.Import | ast.ImportFrom) for node in parsed(cells[number]).body
        )
        if not imports and script.strip() != cells[number].source.strip():
            (tmp_path / f"{number}.py").write_text(script + "\n")
    assert not faults(tmp_path, "F401,F811,F841,F821")


@every_notebook
def test_a_copied_cell_prints_all_that_its_page_shows(name):
    """Jupyter's own Markdown would be printed as ``<IPython.core.display.Markdown object>``."""
    for cell in code_cells(read(name)):
        assert not is_shown_by_jupyter_alone(cell.source), cell.source
        assert "from IPython.display import Markdown" not in cell.source


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
    written = tagged[0].source.splitlines()
    for parameter in papermill.inspect_notebook(str(BOOK / f"{name}.ipynb")).values():
        # One that fills its line has the comment above.
        line = next(i for i, text in enumerate(written) if text.startswith(f"{parameter['name']}:"))
        assert parameter["help"] or written[line - 1].startswith("# "), (
            f"{parameter['name']} has no comment"
        )


def test_a_parameter_has_one_type_in_all_notebooks():
    types = {
        (p.name, p.type)
        for name in NAMES
        for p in notebook_parameters(BOOK / f"{name}.ipynb").values()
    }
    assert len(types) == len(dict(types))


@every_notebook
def test_a_page_is_short(name):
    notebook = read(name)
    code, folded = code_cells(notebook), tagged(notebook, "hide-input")
    assert len(notebook.cells) <= (40 if name.endswith("/checks") else 30)
    assert len(folded) <= 3
    for cell in code:
        if cell in folded:
            assert lines(cell) <= 6, cell.source
            assert not any(isinstance(node, LOOPS) for node in ast.walk(parsed(cell))), cell.source


def hidden_arguments(cell: nbformat.NotebookNode) -> list[str]:
    """The calls of a cell that draws whose arguments stand in a dictionary above them."""
    tree = parsed(cell)
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    if not names & {"sns", "plt"}:
        return []
    return [ast.unparse(call) for call in calls if any(not word.arg for word in call.keywords)]


def test_hidden_arguments_are_seen():
    cell = nbformat.v4.new_code_cell('look = {"x": "layer"}\nsns.lineplot(table, **look)')
    assert hidden_arguments(cell) == ["sns.lineplot(table, **look)"]
    cell = nbformat.v4.new_code_cell('sns.lineplot(table, x="layer")\nlen(table)')
    assert not hidden_arguments(cell)
    cell = nbformat.v4.new_code_cell("measure(model, corpus, **settings)")
    assert not hidden_arguments(cell)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_cell_that_draws_writes_its_arguments_out(path):
    """That is what readers copy; no picture is worth a dictionary of its options."""
    hiding = []
    for cell in code_cells(nbformat.read(path, 4)):
        hiding += hidden_arguments(cell)
    assert not hiding


@functools.cache
def folded_share() -> float:
    notebooks = [read(name) for name in NAMES]
    folded = [cell for notebook in notebooks for cell in tagged(notebook, "hide-input")]
    return lines(*folded) / lines(
        *(cell for notebook in notebooks for cell in code_cells(notebook))
    )


def test_few_lines_are_folded():
    assert folded_share() <= 0.12


@every_notebook
def test_prose_is_of_texts_and_sentences(name):
    prose = " ".join(cell.source for cell in read(name).cells if cell.cell_type == "markdown")
    # But for the name of a table.
    assert "utterance" not in prose.lower().replace("_", "-").replace("utterance-similarity", "")


@every_notebook
def test_code_follows_words(name):
    """Parameters and imports speak for themselves; then a sentence is for four cells at most."""
    cells = read(name).cells
    kinds = [cell.cell_type for cell in cells if cell not in tagged(read(name), "found")]
    first = next(i for i, c in enumerate(cells) if "import " in c.source and c.cell_type == "code")
    assert "code code code code code" not in " ".join(kinds[first + 1 :])


@every_notebook
def test_the_last_cell_computes_the_finding(name):
    """The site shows it at the top, so there is one such cell, and it is folded; checks have
    none.
    """
    notebook = read(name)
    if found := tagged(notebook, "found"):
        assert found == [notebook.cells[-1]]
        assert found[0] in tagged(notebook, "hide-input")
    assert found or name.endswith("/checks")


@every_notebook
def test_a_finding_is_short(name, smoke_site):
    said = finding(nbformat.read(ROOT / "_build" / "executed" / "smoke" / f"{name}.ipynb", 4))
    assert bool(said) == bool(tagged(read(name), "found"))
    assert len(said.split()) <= 45, said
    assert not said or re.search(r" Over [\d,]+ \w+[\w, ]*\.$", said), said
    assert not re.search(r"\[[-−\d.]+, [-−\d.]+\]|\bnan\b|<", said), said


def test_a_figure_or_table_has_a_name_of_its_own():
    figures = [
        c.metadata["mystnb"]["figure"]["name"]
        for n in NAMES
        for c in read(n).cells
        if "mystnb" in c.metadata
    ]
    tables = re.findall(
        r'"(tbl-[\w-]+)"', "".join(cell.source for name in NAMES for cell in code_cells(read(name)))
    )
    assert len(figures) > 40
    assert not [name for names in (figures, tables) for name in {*names} if names.count(name) > 1]


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
    assert figures or drawn(executed)
    for cell in figures:
        options = cell.metadata.get("mystnb", {})
        assert options.get("figure", {}).get("name", "").startswith("fig-"), cell.source
        assert options["figure"].get("caption"), cell.source
        assert options.get("image", {}).get("alt"), cell.source
        # A gallery shows them one by one.
        assert not re.search(
            r"figure (before|above)|(first|same) figure|same way|as above",
            options["figure"]["caption"],
        )


JUPYTER = "from nbclient.cli import main; main()"
SMALL = {"data": "news", "limit": "20"}


def test_runs_with_papermill_as_it_is(tmp_path):
    out = tmp_path / "out.ipynb"
    parameters = [part for name, value in SMALL.items() for part in ("-p", name, value)]
    command = [sys.executable, "-m", "papermill", "book/outliers/attention.ipynb", out, *parameters]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    assert any(draws(cell) for cell in nbformat.read(out, 4).cells if cell.cell_type == "code")


def test_runs_with_jupyter_execute_in_any_folder(tmp_path):
    """Small: its command takes no parameters."""
    notebook = read("outliers/attention")
    cell = next(cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", []))
    cell.source += '\ndata, limit = "news", 20'
    nbformat.write(notebook, tmp_path / "attention.ipynb")
    command = [sys.executable, "-P", "-c", JUPYTER, "attention.ipynb", "--output=out.ipynb"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    assert any(
        draws(cell)
        for cell in nbformat.read(tmp_path / "out.ipynb", 4).cells
        if cell.cell_type == "code"
    )
