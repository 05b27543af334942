"""Planted tables, and the verdicts on them."""

import ast
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from unittest import mock

import numpy as np
import pandas as pd

from analysis_book.figures import Verdicts
from analysis_book.papers import claims
from analysis_lib.measurement import Chosen, Ratio, Tables
from analysis_lib.measurement.tables import LazyTables, Plain, Statistic
from analysis_lib.metrics.intervals import Estimate

BOOK = Path(__file__).resolve().parents[1] / "book"


class Planted(Tables):
    """Tables without a model: what ``claims.verdicts`` needs, with an interval that reaches so far
    on each side.
    """

    # As many groups as a jackknife has.
    groups = range(20)

    def __init__(
        self,
        tables: Mapping = MappingProxyType({}),
        reach: float = 1e-9,
        layers: pd.DataFrame | None = None,
        **more,
    ):
        LazyTables.__init__(self, {**tables, **more}, lambda table: table, layers)
        self.reach = reach
        self.run = {"model": "planted", "data": "texts", "texts": 40, "kind": "text"}

    def intervals(self, statistics, *others):
        found = {}
        for name, statistic in statistics.items():
            one = statistic if isinstance(statistic, Plain | Ratio) else Plain(statistic)
            at = [one.choose(self, *others)] if isinstance(one, Chosen) else []
            values = np.asarray(one.number(self, *others, *at), dtype=float)
            every = [
                Estimate(v, v - self.reach, v + self.reach, 20) for v in map(float, values.ravel())
            ]
            found[name] = one.judged(every) if values.ndim else every[0]
        return found


def verdicts_of(statistics: Mapping[str, Statistic], **tables) -> list[str]:
    return claims.verdicts(statistics, Planted(tables))["verdict"].tolist()


def run_cells(page: str, *containing: str, **names) -> dict:
    """What cells of a page leave behind when they run, after its imports and parameters, on planted
    names.

    Args:
        page: such as ``outliers/attention``.
        containing: for each cell, a text that it alone contains.
        names: what the cells read, beside what the page imports and its parameters, or in their
            place.
    """
    cells = json.loads((BOOK / f"{page}.ipynb").read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    (parameters,) = [
        "".join(cell["source"])
        for cell in cells
        if "parameters" in cell["metadata"].get("tags", [])
    ]
    statements = (node for source in sources for node in ast.parse(source).body)
    imports = [
        ast.unparse(node) for node in statements if isinstance(node, ast.Import | ast.ImportFrom)
    ]
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


def shown(verdicts: pd.DataFrame) -> Verdicts:
    """What ``claims.show`` shows."""
    with mock.patch("IPython.display.display") as display:
        claims.show(verdicts)
    return display.call_args.args[0]
