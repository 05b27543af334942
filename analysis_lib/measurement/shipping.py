"""Measurements that ship with the book, of models that a build does not load.

Example: ``shipped("mpnet-base")``.
"""

import json
import logging
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pandas as pd

from analysis_lib import files
from analysis_lib.capture.inputs import Settings
from analysis_lib.corpora import Corpus
from analysis_lib.errors import AnalysisError, near_names, require_text
from analysis_lib.measurement.tables import LazyTables, Tables
from analysis_lib.measurement.versions import formulas, is_current
from analysis_lib.metrics import resolve
from analysis_lib.metrics.accumulator import Metric
from analysis_lib.models.loading import revision_of
from analysis_lib.models.names import title

# How many untrained twins of a model come with the book.
TWINS = 5


def home() -> Path:
    """The folder of the measurements that ship with the book."""
    return files.data_directory() / "measurements"


def descriptions(file: str) -> dict[str, dict]:
    """Descriptions of the shipped measurements, by the name of their folder.

    Args:
        file: ``run.json``, ``dynamics.json`` or ``results.json``.
    """
    return {path.parent.name: files.read_json(path) for path in sorted(home().glob(f"*/{file}"))}


def code_warning(titles: Iterable[str]) -> str:
    """Warning of a page about measurements by an older version of the code.

    Args:
        titles: the titles of the models concerned; without any, the warning is empty.
    """
    if not (unique_titles := [*dict.fromkeys(titles)]):
        return ""
    return (
        f"The tables of {', '.join(unique_titles)} were recorded by another version of the code: "
        "`make record` renews them."
    )


class Shipped(LazyTables):
    """The tables of a shipped measurement by name, each read on first use.

    Attributes:
        folder: the folder of the tables.
        run: parameters, model, data, versions and duration, from ``run.json``.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.run = files.read_json(folder / "run.json")
        read = partial(files.read, how=pd.read_parquet)
        parts = {name: folder / f"{name}.parquet" for name in self.run["tables"]}
        super().__init__(parts, read, pd.DataFrame(self.run["layers"]))

    @property
    def code_warning(self) -> str:
        """Warning that today's code may give other tables.

        Empty if its formulas are those of the tables.
        """
        outdated = [] if self.is_current else [title(self.run["model"])]
        return code_warning(outdated)

    @property
    def is_current(self) -> bool:
        """Whether today's formulas have the versions that made the tables."""
        return is_current(self.run, formulas(resolve(list(self))))


def shipped_twin(
    name: str, corpus: Corpus, metrics: str | Iterable[str | Metric], settings: Settings
) -> Shipped | None:
    """The shipped tables of an untrained twin, if measuring it would give the same; else None.

    Random weights depend only on their seed, so that most builds need not measure them. The shipped
    tables must have the same weights, corpus and settings, and formulas of the same versions with
    the same parameters.
    """
    wanted = json.loads(json.dumps(formulas(resolve(metrics))["metrics"]))
    written = json.loads(json.dumps(settings.described()))
    of_vectors = [written, written | {"maps": None}]
    for path in sorted(home().glob("untrained/*/run.json")):
        tables = Shipped(path.parent)
        run = tables.run
        if run["model"] != name or run["data_sha256"] != corpus.sha256:
            continue
        if run["settings"] not in of_vectors or not tables.is_current:
            continue
        recorded = run["formulas"]["metrics"]
        if any(recorded.get(metric) != known for metric, known in wanted.items()):
            continue
        # Checked last, since it reads the weights of a model in a folder.
        if run["model_revision"] == revision_of(name):
            return tables
    return None


def shipped(model: str) -> Shipped:
    """The shipped measurement of a model, from ``data/measurements``.

    Args:
        model: the name of its folder, such as ``mpnet-base``, or ``untrained/mpnet-base-0`` for an
            untrained twin.

    Raises:
        AnalysisError: there is none; the message gives the nearest names.
    """
    require_text("the model", model, "the name of one whose measurement comes with the book")
    if not (home() / model / "run.json").is_file():
        near = near_names(model, descriptions("run.json"))
        raise AnalysisError(f"no measurement of {model} comes with the book: {near}")
    return Shipped(home() / model)


def shipped_runs(names: Iterable[str], twins: int = 0) -> dict[tuple[str, int | None], Shipped]:
    """Shipped measurements as a :class:`Comparison` holds them, with those of untrained twins.

    Args:
        names: of models, see :func:`shipped`.
        twins: at most how many of each; ``TWINS`` of them come with the book.

    Returns:
        By model and twin, which is None for the model itself.

    Raises:
        AnalysisError: one of them does not come with the book.
    """
    runs: dict[tuple[str, int | None], Shipped] = {}
    for name in names:
        runs[name, None] = shipped(name)
        for twin in range(min(twins, TWINS)):
            runs[name, twin] = shipped(f"untrained/{name}-{twin}")
    return runs


def with_shipped(
    tables: Tables | Iterable[Tables], names: Iterable[str]
) -> dict[str, Tables | Shipped]:
    """Measurements, and those shipped of other models on the same corpus, by the model's title.

    Args:
        tables: what was measured.
        names: of shipped measurements, see :func:`shipped`; those of another corpus, or of a model
            that was measured, are left out.
    """
    measured = [tables] if isinstance(tables, Tables) else [*tables]
    every: dict[str, Tables | Shipped] = {run.title: run for run in measured}
    corpora = {run.run["data"] for run in measured}
    models = {run.run["model"] for run in measured}
    for name in names:
        other = shipped(name)
        if other.run["model"] in models or other.run["data"] not in corpora:
            continue
        if other.code_warning:
            logging.getLogger(__name__).warning("note: %s", other.code_warning)
        every[title(other.run["model"])] = other
    return every
