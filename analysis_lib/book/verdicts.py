"""The verdicts of executed notebooks, gathered."""

from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from analysis_lib.book.parameters import read_notebook


def verdicts(executed: Iterable[Path]) -> pd.DataFrame:
    """One row per claim and model, dataset or variant: the column page, then those of ``papers.claims``.

    Raises:
        AnalysisError: a notebook cannot be read.
    """
    outputs = [(path.stem, out) for path in executed for c in read_notebook(path).cells for out in c.get("outputs", ())]
    rows = [{"page": page, **row} for page, out in outputs for row in out.get("metadata", {}).get("verdicts", ())]
    return pd.DataFrame(rows)
