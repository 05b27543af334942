"""Planted tables, and the verdicts on them."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from analysis_lib.papers import claims

BOOK = Path(__file__).resolve().parents[1] / "book"


class Planted(dict):
    """Tables without a model: what ``claims.verdicts`` needs, with an interval that reaches so far on each side."""

    # As many groups as a jackknife has.
    groups = range(20)

    def __init__(self, tables=(), reach: float = 0.0, **more):
        super().__init__(tables, **more)
        self.reach = reach

    def interval(self, statistic, *others):
        value = np.asarray(statistic(self, *others), dtype=float)
        return value, value - self.reach, value + self.reach


def verdicts_of(statistics: Mapping[str, claims.Statistic], **tables) -> list[str]:
    return claims.verdicts(statistics, Planted(tables))["verdict"].tolist()


def run_cells(page: str, *containing: str, **names) -> dict:
    """What cells of a page leave behind when they run, after its imports and parameters, on planted names.

    Args:
        page: such as ``outliers/attention``.
        containing: for each cell, a text that it alone contains.
        names: what the cells read, beside what the page imports and its parameters, or in their place.
    """
    cells = json.loads((BOOK / f"{page}.ipynb").read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    (parameters,) = ["".join(cell["source"]) for cell in cells if "parameters" in cell["metadata"].get("tags", [])]
    imports = re.findall(r"^(?:from|import) .*", "\n".join(sources), re.MULTILINE)
    space: dict = {}
    exec("\n".join([*imports, parameters]), space)
    space.update(names)
    for text in containing:
        (source,) = [source for source in sources if text in source]
        exec(source, space)
    return space


def verdicts_on_page(page: str, *containing: str, **names) -> list[str]:
    """The verdicts of the cell of a page that defines its statistics, and of cells before it."""
    return run_cells(page, *containing, "statistics = {", **names)["verdicts"]["verdict"].tolist()
