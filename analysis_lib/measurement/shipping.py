"""Measurements that come with the book, of models that a build does not load: ``shipped("mpnet-base")``."""

import json
from pathlib import Path

import pandas as pd

from analysis_lib.corpora.packages import data_directory
from analysis_lib.errors import AnalysisError, near_names
from analysis_lib.measurement.stored import measuring_code
from analysis_lib.measurement.tables import LazyTables
from analysis_lib.metrics import resolve


class Shipped(LazyTables):
    """The tables that the command ``measure`` has written, by name, each read when first asked for.

    Attributes:
        run: parameters, model, data, versions and duration: ``run.json``.
        layers: one row per layer, see :class:`~analysis_lib.measurement.tables.Tables`.
    """

    def __init__(self, folder: Path):
        self.run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        super().__init__({name: folder / f"{name}.parquet" for name in self.run["tables"]}, pd.read_parquet)
        self.layers = pd.DataFrame(self.run["layers"])

    @property
    def code_warning(self) -> str:
        """For a page to show: that the tables may not be what the code gives today, or an empty text."""
        if self.run["sources"] == measuring_code(resolve(list(self))):
            return ""
        return (
            f"The code that measures has changed since {self.run['model']} was measured; data/README.md says how to "
            f"measure it anew."
        )


def shipped(model: str) -> Shipped:
    """The measurement of a model that comes with the book, in ``data/measurements``.

    Raises:
        AnalysisError: none comes with it (with the nearest names of those that do).
    """
    folder = data_directory() / "measurements"
    known = [path.parent.name for path in folder.glob("*/run.json")]
    if model not in known:
        raise AnalysisError(f"no measurement of {model} comes with the book: {near_names(model, known)}")
    return Shipped(folder / model)
