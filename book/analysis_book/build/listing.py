"""The notebooks and their parameters, read without what executes them: a list comes at once."""

import ast
import itertools
import json
import textwrap
from collections.abc import Sequence
from pathlib import Path

from analysis_lib.errors import AnalysisError, near_names

PACKAGE = Path(__file__).resolve().parents[1]
# Of a clone; a wheel has its notebooks in the package.
ROOT = PACKAGE.parents[1]
# Where the notebooks of reports lie, which are named ``report/NAME``.
REPORT = Path(__file__).with_name("report")


def is_clone() -> bool:
    """True in a clone, where the book can be built, and not in an installed wheel."""
    return (ROOT / "_toc.yml").is_file()


def home() -> Path:
    """The folder of the book's notebooks, in a clone or installed."""
    return ROOT / "book" if is_clone() else PACKAGE / "notebooks"


def located(notebook: Path) -> Path:
    """The file of a notebook: as it is given, or a page of the book by its name.

    Raises:
        AnalysisError: neither is there (with the nearest names of pages).
    """
    if notebook.is_file():
        return notebook
    of_report = REPORT / f"{notebook.name}.ipynb"
    if notebook.parent == Path("report") and of_report.is_file():
        return of_report
    page = home() / f"{notebook}.ipynb"
    if notebook.suffix or notebook.is_absolute() or not page.is_file():
        raise AnalysisError(
            f"there is no notebook {notebook}: {near_names(str(notebook), pages())}"
        )
    return page


def pages() -> dict[str, Path]:
    """The notebooks of the book, and those of reports, by name."""
    paths = {}
    for folder, prefix in ((home(), ""), (REPORT, "report/")):
        for path in sorted(folder.rglob("*.ipynb")):
            # In a clone, the second folder lies in the first.
            is_listed = folder == REPORT or not path.is_relative_to(REPORT)
            if is_listed and ".ipynb_checkpoints" not in path.parts:
                name = path.relative_to(folder).with_suffix("").as_posix()
                paths[f"{prefix}{name}"] = path
    return paths


def titles() -> dict[str, str]:
    """The title of each notebook, by name."""
    headings = {}
    for name, path in pages().items():
        first = _cells(path)[0]
        headings[name] = _source(first).partition("\n")[0].removeprefix("# ")
    return headings


def commented(notebook: Path) -> dict[str, tuple[str, str, str]]:
    """The parameters of a notebook by name, as its cell has them: type, default and comment."""
    cells = [cell for cell in _cells(notebook) if "parameters" in cell["metadata"].get("tags", ())]
    if not cells:
        return {}
    source = _source(cells[0])
    try:
        statements = ast.parse(source).body
    except SyntaxError as error:
        raise AnalysisError(
            f"{notebook}: its parameters cell is not plain Python: {error.msg}"
        ) from None
    declared = {}
    for statement in statements:
        comment = _comment(source, statement)
        match statement:
            case ast.AnnAssign(ast.Name(name), kind, ast.expr() as value):
                declared[name] = (ast.unparse(kind), ast.unparse(value), comment)
            case ast.Assign([ast.Name(name)], value):
                declared[name] = ("", ast.unparse(value), comment)
    return declared


def _comment(source: str, statement: ast.stmt) -> str:
    """The comment on a statement: behind it, or in the line above."""
    lines = source.splitlines()
    # Positions are counted in bytes.
    behind = lines[statement.end_lineno - 1].encode()[statement.end_col_offset :].decode()
    above = lines[statement.lineno - 2] if statement.lineno > 1 else ""
    comment = behind.strip()
    if not comment and above.startswith("#"):
        comment = above
    return comment.lstrip("# ")


def _cells(notebook: Path) -> list[dict]:
    try:
        return json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise AnalysisError(
            f"{notebook} cannot be read ({reason}): give a notebook as Jupyter saves it"
        ) from error


def _source(cell: dict) -> str:
    source = cell["source"]
    return source if isinstance(source, str) else "".join(source)


# No column of a table becomes narrower.
NARROWEST = 8


def in_columns(rows: Sequence[Sequence[str]], width: int) -> str:
    """Rows of texts as columns, the widest of which are wrapped until a line fits the width.

    >>> print(in_columns([["name", "what it is"], ["sink", "a key that receives much"]], 18))
    name  what it is
    sink  a key that
          receives
          much
    """
    return "\n".join(wrapped(rows, width))


def wrapped(rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Each row as :func:`in_columns` has it, in one line or several."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    room = width - 2 * (len(widths) - 1)
    while sum(widths) > room and max(widths) > NARROWEST:
        widths[widths.index(max(widths))] -= 1
    texts = []
    for row in rows:
        cells = [textwrap.wrap(cell, max(1, size)) for cell, size in zip(row, widths, strict=True)]
        lines = []
        for parts in itertools.zip_longest(*cells, fillvalue=""):
            line = "  ".join(part.ljust(size) for part, size in zip(parts, widths, strict=True))
            lines.append(line.rstrip())
        texts.append("\n".join(lines))
    return texts
