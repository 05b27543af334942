"""Recorded effects of interventions: files in ``data/measurements/causes``.

Each has one row per number.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pandas as pd

from analysis_lib import files
from analysis_lib.corpora import Corpus
from analysis_lib.files import data_directory
from analysis_lib.metrics.intervals import Estimate

COLUMNS = ("value", "ci_low", "ci_high", "groups")


def as_columns(estimate: Estimate) -> dict[str, float]:
    """A number, its interval, and over how many groups that is."""
    numbers = (*estimate.row, estimate.draws)
    return dict(zip(COLUMNS, numbers, strict=True))


def origin(
    model: str,
    corpus: Corpus,
    **more: object,
) -> dict[str, object]:
    """The columns that say where rows come from: a model, its texts, and more."""
    return {"model": model, "texts": texts_of(corpus), **more}


def texts_of(corpus: Corpus) -> str:
    """The start of the hash of the texts, which stands for them in a column."""
    return corpus.sha256[:12]


def read(name: str) -> pd.DataFrame:
    """All rows of a file."""
    return files.read(path(name), pd.read_csv)


def rows_of(
    name: str,
    measured: Callable[[], pd.DataFrame],
    **origin: object,
) -> pd.DataFrame:
    """The rows of a file that have one :func:`origin`, without its columns; or else measured."""
    rows = read(name)
    same = rows[[*origin]] == pd.Series(origin)
    rows = rows[same.all(axis=1)]
    if rows.empty:
        return measured()
    return rows.drop(columns=[*origin]).reset_index(drop=True)


def write(name: str, tables: Iterable[tuple[pd.DataFrame, Mapping[str, object]]]) -> None:
    """Write the file that :func:`rows_of` reads, of rows and their :func:`origin`."""
    rows = pd.concat([table.assign(**columns) for table, columns in tables])
    text = rows.to_csv(index=False, float_format="%.6g")
    files.write(path(name), text)


def path(name: str) -> Path:
    """The file of a name, in which all but letters and digits become hyphens."""
    stem = re.sub("[^a-z0-9]+", "-", name)
    return data_directory() / "measurements" / "causes" / f"{stem}.csv"
