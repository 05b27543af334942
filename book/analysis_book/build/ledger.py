"""The ledger: the claims of the papers, with the verdicts of executed notebooks."""

from collections.abc import Mapping
from pathlib import Path

import pandas as pd
from nbformat import NotebookNode

from analysis_book.build.parameters import read_notebook
from analysis_book.figures.verdicts import GROUPS
from analysis_book.papers import claims
from analysis_lib.metrics.intervals import CONFIDENCE

NOT_RUN = "not run"
MIXED = "mixed"
# No number has an interval, or there is none.
WITHOUT = "without a verdict"
NUMBERS = ("value", "ci_low", "ci_high", "draws", "p")
_OF_VERDICT = (*NUMBERS, "verdict", "sample")


def ledger(pages: Mapping[str, Path]) -> pd.DataFrame:
    """Every claim of the papers, with each of its verdicts in these executed notebooks.

    Args:
        pages: by the name of the page.

    Returns:
        One row per verdict, the same on two pages once, and one per claim without any (``not
        run``): the fields of a claim, with claim for its sentence; paper, whose claim it is; those
        of a verdict; the columns of ``GROUPS``; after (the verdict, if those on all models are to
        be right at once); scope, one of ``SCOPES``; judged_by (the page) and figure (of that page,
        the one that shows the number; or ""). The claims of the papers come in the order of the
        papers, then those that no paper makes.

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
    fields = [
        vars(claim) | {"source": claim.source, "paper": claim.paper} for claim in every.values()
    ]
    # Those of ours stand with the predictions, whatever paper they are after.
    known = pd.DataFrame(fields).sort_values("ours", kind="stable")
    rows = known.rename(columns={"sentence": "claim"}).merge(rows, on="id", how="left")
    rows["judged_by"] = rows["judged_by"].fillna(rows["page"])
    rows["scope"] = claims.scopes(rows)
    without = {"verdict": NOT_RUN, "after": NOT_RUN, "figure": "", "sample": ""}
    return rows.astype(dict.fromkeys(without, object)).fillna(without)


def outcomes(rows: pd.DataFrame, elsewhere: bool = False) -> pd.DataFrame:
    """The outcome of each claim on its paper's own setting, after correction.

    Args:
        rows: of :func:`ledger`.
        elsewhere: over other models and texts instead; claims of ours, which have no setting of a
            paper, are left out then.

    Returns:
        Columns id, paper and outcome: ``holds``, ``holds, small``, ``does not hold`` or
        ``undecided`` wherever a number has an interval; ``mixed`` where these differ, but that what
        holds a little somewhere does so on the whole; ``without a verdict`` (no number has an
        interval) or ``not run``.
    """
    counted = [claims.ELSEWHERE] if elsewhere else [claims.OWN_SETTING, claims.OURS]
    if elsewhere:
        rows = rows[rows["scope"] != claims.OURS]
    after = rows["after"].where(rows["scope"].isin(counted), NOT_RUN)
    by_claim = after.groupby([rows["id"], rows["paper"]], sort=False).agg(_outcome)
    return by_claim.rename("outcome").reset_index()


def _outcome(after: pd.Series) -> str:
    """The outcome of a claim, of all its verdicts."""
    verdicts = {*after}
    judged = verdicts & {*claims.DECIDED, claims.UNDECIDED}
    if not judged:
        return WITHOUT if verdicts & {claims.NO_INTERVAL, claims.NOT_APPLICABLE} else NOT_RUN
    if judged == {claims.HOLDS, claims.SMALL}:
        return claims.SMALL
    return judged.pop() if len(judged) == 1 else MIXED


def by_chance(judged: int) -> float:
    """How many of so many claims would hold by chance, at most, if each lay at its bound.

    An interval of 95 % lies wholly beyond the truth on one given side 2.5 times in 100.
    """
    return judged * (1 - CONFIDENCE) / 2


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
