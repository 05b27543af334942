"""Cells of the pages on classification, run on planted data."""

from pathlib import Path

import nbformat

BOOK = Path(__file__).resolve().parents[3] / "book" / "classification"


def run_cells(page: str, *marks: str, **names: object) -> dict:
    """The names that parameters and imports of a page leave, and the first cells with these marks, one after another.

    Args:
        names: what the cells find, in place of what the page imports under these names.
    """
    cells = [cell for cell in nbformat.read(BOOK / f"{page}.ipynb", 4).cells if cell.cell_type == "code"]
    (parameters,) = [cell.source for cell in cells if "parameters" in cell.metadata.get("tags", [])]
    sources, space = [cell.source for cell in cells], {}
    exec(parameters, space)
    space.update(names)
    for mark in ("import ", *marks):
        exec(next(source for source in sources if mark in source), space)
        if mark == "import ":
            space.update(names)
    return space
