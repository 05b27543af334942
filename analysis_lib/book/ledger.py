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
        claim, paper, on (what it is judged on, or needs), those of a verdict, corrected (over all rows), judged_by and
        table.

    Raises:
        AnalysisError: a notebook cannot be read.
    """
    found = []
    for name, path in pages.items():
        notebook = read_notebook(path)
        given = notebook.metadata.get("analysis_lib", {}).get("parameters", {})
        # What a page on one model, run or corpus need not repeat; a row that names its model may be of another corpus.
        known = {group: given.get(parameter) for group, parameter in PARAMETERS.items()}
        outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
        rows = [row for output in outputs for row in output.get("metadata", {}).get("verdicts", ())]
        found += [{"judged_by": name} | (row if row.get("model") else known | row) for row in rows]
    rows = pd.DataFrame(found, columns=["id", *NUMBERS, "verdict", "table", "judged_by", *GROUPS])
    rows = rows.astype(dict.fromkeys(NUMBERS, float)).drop_duplicates(["id", *GROUPS, *NUMBERS])
    about = rows[[*GROUPS]].astype(object).to_numpy()
    rows["on"] = [", ".join(str(value) for value in values if not pd.isna(value)) for values in about]
    rows["corrected"] = claims.corrected(rows)
    known = pd.DataFrame([vars(claim) for paper in claims.PAPERS for claim in claims.load(paper).values()])
    known["paper"] = known["id"].str.partition("-")[0].map(claims.PAPERS)
    rows = known.merge(rows, on="id", how="left")
    rows["judged_by"] = rows["judged_by"].fillna(rows["page"])
    rows["on"] = rows["on"].astype(object).fillna("needs " + rows["needs"])
    without = {"verdict": NOT_RUN, "corrected": NOT_RUN, "table": ""}
    return rows.astype(dict.fromkeys(without, object)).fillna(without)
