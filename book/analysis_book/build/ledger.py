"""The ledger: the claims of the papers, with the verdicts of executed notebooks."""

from collections.abc import Mapping
from pathlib import Path

import pandas as pd
from nbformat import NotebookNode

from analysis_book.build.parameters import read_notebook
from analysis_book.figures.verdicts import GROUPS
from analysis_book.papers import claims

NOT_RUN = "not run"
NUMBERS = ("value", "ci_low", "ci_high", "draws", "p")
_OF_VERDICT = (*NUMBERS, "verdict", "sample")


def ledger(pages: Mapping[str, Path]) -> pd.DataFrame:
    """Every claim of the papers, with each of its verdicts in these executed notebooks.

    Args:
        pages: by the name of the page.

    Returns:
        One row per verdict, the same on two pages once, and one per claim without any (``not
        run``): the fields of a claim, with claim for its sentence; paper; those of a verdict; the
        columns of ``GROUPS``; after (the verdict, if those on all models are to be right at once);
        judged_by (the page) and figure (of that page, the one that shows the number; or "").

    Raises:
        AnalysisError: a notebook cannot be read.
    """
    every = {}
    for paper in claims.PAPERS:
        every |= claims.load(paper)
    records = []
    for page, path in pages.items():
        notebook = read_notebook(path)
        drawn = {*_figures(notebook)}
        for row in _verdicts(notebook):
            # A claim that the book no longer makes has no row.
            if row["id"] in every:
                shown = [figure for figure in every[row["id"]].figures if figure in drawn]
                records.append(row | {"judged_by": page, "figure": (shown or [""])[0]})
    rows = pd.DataFrame(records, columns=["id", *GROUPS, *_OF_VERDICT, "judged_by", "figure"])
    rows = rows.astype(dict.fromkeys(NUMBERS, float)).drop_duplicates(["id", *GROUPS, *NUMBERS])
    rows["after"] = claims.corrected(rows)
    known = pd.DataFrame([vars(claim) | {"source": claim.source} for claim in every.values()])
    known["paper"] = known["id"].str.partition("-")[0].map(claims.PAPERS)
    rows = known.rename(columns={"sentence": "claim"}).merge(rows, on="id", how="left")
    rows["judged_by"] = rows["judged_by"].fillna(rows["page"])
    without = {"verdict": NOT_RUN, "after": NOT_RUN, "figure": "", "sample": ""}
    return rows.astype(dict.fromkeys(without, object)).fillna(without)


def outcomes(rows: pd.DataFrame) -> pd.DataFrame:
    """The outcome of each claim, over all that it was judged on, after correction.

    Args:
        rows: of :func:`ledger`.

    Returns:
        Columns id, paper and outcome: ``holds``, ``does not hold`` or ``undecided`` wherever a
        number has an interval; ``mixed`` where these differ; ``without a verdict`` (no number has
        an interval) or ``not run``.
    """

    def outcome(after: pd.Series) -> str:
        judged = {*after} & {claims.HOLDS, claims.FAILS, claims.UNDECIDED}
        if judged:
            return judged.pop() if len(judged) == 1 else "mixed"
        return NOT_RUN if NOT_RUN in {*after} else "without a verdict"

    by_claim = rows.groupby(["id", "paper"], sort=False)["after"].agg(outcome)
    return by_claim.rename("outcome").reset_index()


def _verdicts(notebook: NotebookNode) -> list[dict]:
    """The verdicts in the outputs of a notebook."""
    verdicts = []
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            verdicts += output.get("metadata", {}).get("verdicts", ())
    return verdicts


def _figures(notebook: NotebookNode) -> list[str]:
    """The names of the figures of a notebook."""
    named = [
        cell.metadata.get("mystnb", {}).get("figure", {}).get("name") for cell in notebook.cells
    ]
    return [name for name in named if name]
