"""What interventions did, as it comes with the book: files in ``data/measurements/causes`` of one
row per number.
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


def as_columns(found: Estimate) -> dict[str, float]:
    """A number, its interval, and over how many groups that is."""
    return dict(zip(COLUMNS, (*found.row, found.draws), strict=True))


def place_of(model: str, corpus: Corpus, **more: object) -> dict[str, object]:
    """The columns that say what rows are of: a model, its texts, and more."""
    return {"model": model, "texts": texts_of(corpus), **more}


def texts_of(corpus: Corpus) -> str:
    """What stands for the texts in a column."""
    return corpus.sha256[:12]


def read(name: str) -> pd.DataFrame:
    """All rows of a file."""
    return files.read(path(name), pd.read_csv)


def rows_of(name: str, measured: Callable[[], pd.DataFrame], **place: object) -> pd.DataFrame:
    """The rows of a file whose columns say what they are of, without these columns; where there are
    none, measured.
    """
    rows = read(name)
    rows = rows[(rows[[*place]] == pd.Series(place)).all(axis=1)].drop(columns=[*place])
    return rows.reset_index(drop=True) if len(rows) else measured()


def write(name: str, found: Iterable[tuple[pd.DataFrame, Mapping[str, object]]]) -> None:
    """Write the file that :func:`rows_of` reads, of rows and what they are of."""
    rows = pd.concat([rows.assign(**place) for rows, place in found])
    files.write(path(name), rows.to_csv(index=False, float_format="%.6g"))


def path(name: str) -> Path:
    """The file of a name, in which all but letters and digits become hyphens."""
    return data_directory() / "measurements" / "causes" / f"{re.sub('[^a-z0-9]+', '-', name)}.csv"
