"""The ledger: the claims of the papers, with the verdicts of executed notebooks."""

from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from analysis_lib.book.parameters import read_notebook
from analysis_lib.papers import claims

NOT_RUN = "not run"
# What a verdict is about.
GROUPS = ("model", "run", "dataset", "variant", "classes", "stage")
PARAMETERS = {"model": "model", "run": "run", "dataset": "data"}
NUMBERS = ("value", "ci_low", "ci_high", "draws", "p")


def ledger(pages: Mapping[str, Path]) -> pd.DataFrame:
    """Every claim of the papers, with each of its verdicts in these executed notebooks.

    Args:
        pages: by the name of the page.

    Returns:
        One row per verdict, the same on two pages once, and one per claim without any (``not run``): the fields of a
        claim, paper, on (what it is judged on, or needs), subject (its model, run or corpus), those of a verdict,
        corrected (over all rows), judged_by, table and figure (of that page, the one that shows the number; or "").

    Raises:
        AnalysisError: a notebook cannot be read.
    """
    every = {name: claim for paper in claims.PAPERS for name, claim in claims.load(paper).items()}
    found = []
    for name, path in pages.items():
        notebook = read_notebook(path)
        given = notebook.metadata.get("analysis_lib", {}).get("parameters", {})
        # What a page on one model, run or corpus need not repeat; a row that names its model may be of another corpus.
        known = {group: given.get(parameter) for group, parameter in PARAMETERS.items()}
        outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
        rows = [row for output in outputs for row in output.get("metadata", {}).get("verdicts", ())]
        drawn = {cell.metadata.get("mystnb", {}).get("figure", {}).get("name") for cell in notebook.cells}
        # A claim that the book no longer makes has no row.
        for row in (row for row in rows if row["id"] in every):
            figure = next((figure for figure in every[row["id"]].figures if figure in drawn), "")
            found.append({"judged_by": name, "figure": figure} | (row if row.get("model") else known | row))
    rows = pd.DataFrame(found, columns=["id", *NUMBERS, "verdict", "table", "judged_by", "figure", *GROUPS])
    rows = rows.astype(dict.fromkeys(NUMBERS, float)).drop_duplicates(["id", *GROUPS, *NUMBERS])
    about = [[_word(value) for value in values if not pd.isna(value)] for values in rows[[*GROUPS]].to_numpy(object)]
    rows["subject"] = [next(iter(words), "") for words in about]
    rows["on"] = [*map(", ".join, about)]
    rows["corrected"] = claims.corrected(rows)
    known = pd.DataFrame([vars(claim) for claim in every.values()])
    known["paper"] = known["id"].str.partition("-")[0].map(claims.PAPERS)
    rows = known.merge(rows, on="id", how="left")
    rows["judged_by"] = rows["judged_by"].fillna(rows["page"])
    rows["on"] = rows["on"].astype(object).fillna("needs " + rows["needs"])
    without = {"verdict": NOT_RUN, "corrected": NOT_RUN, "table": "", "figure": "", "subject": ""}
    return rows.astype(dict.fromkeys(without, object)).fillna(without)


def _word(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
