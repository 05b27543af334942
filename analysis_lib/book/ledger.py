"""The ledger: the claims of the papers, with the verdicts of executed notebooks."""

import re
from collections.abc import Mapping
from pathlib import Path

import pandas as pd
from nbformat import NotebookNode

from analysis_lib.book.parameters import read_notebook
from analysis_lib.papers import claims

NOT_RUN = "not run"
# What a verdict is about.
GROUPS = ("model", "run", "dataset", "variant", "classes", "stage")
PARAMETERS = {"model": "model", "run": "run", "dataset": "data"}
# Parameters that name what a page is on.
OWN = ("model", "run", "data", "class_data")
NUMBERS = ("value", "ci_low", "ci_high", "draws", "p")


def ledger(pages: Mapping[str, Path]) -> pd.DataFrame:
    """Every claim of the papers, with each of its verdicts in these executed notebooks.

    Args:
        pages: by the name of the page.

    Returns:
        One row per verdict, the same on two pages once, and one per claim without any (``not run``): the fields of a
        claim, paper, on (what it is judged on, or needs), subject (its model, run or corpus), those of a verdict,
        corrected (over all rows), judged_by, table and figure (of that page, the one that shows the number of this
        subject; or "").

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
        drawn = _drawn(notebook)
        # A claim that the book no longer makes has no row.
        for row in (row for row in rows if row["id"] in every):
            row = {"judged_by": name} | (row if row.get("model") else known | row)
            shown = [figure for figure in every[row["id"]].figures if figure in drawn]
            found.append(row | {"figure": _shows(shown, drawn, _about(row), given)})
    rows = pd.DataFrame(found, columns=["id", *NUMBERS, "verdict", "table", "judged_by", "figure", *GROUPS])
    rows = rows.astype(dict.fromkeys(NUMBERS, float)).drop_duplicates(["id", *GROUPS, *NUMBERS])
    about = [*map(_about, rows[[*GROUPS]].to_dict("records"))]
    rows["subject"] = [*map(_subject, about)]
    rows["on"] = [*map(", ".join, about)]
    rows["corrected"] = claims.corrected(rows)
    known = pd.DataFrame([vars(claim) for claim in every.values()])
    known["paper"] = known["id"].str.partition("-")[0].map(claims.PAPERS)
    rows = known.merge(rows, on="id", how="left")
    rows["judged_by"] = rows["judged_by"].fillna(rows["page"])
    rows["on"] = rows["on"].astype(object).fillna("needs " + rows["needs"])
    without = {"verdict": NOT_RUN, "corrected": NOT_RUN, "table": "", "figure": "", "subject": ""}
    return rows.astype(dict.fromkeys(without, object)).fillna(without)


def _about(row: Mapping) -> list[str]:
    """What a verdict is about, in words; first the model, else the run or the corpus."""
    values = [row[group] for group in GROUPS if not pd.isna(row.get(group))]
    return [f"{value:g}" if isinstance(value, float) else str(value) for value in values]


def _subject(about: list[str]) -> str:
    """The model, run or corpus, whether it was measured here or comes with the book."""
    return re.sub(r" \(shipped.*\)$", "", next(iter(about), ""))


def _drawn(notebook: NotebookNode) -> dict[str, str]:
    """The numbers that the figures of a notebook are drawn from, as CSV, by their names."""
    found = {}
    for cell in notebook.cells:
        if name := cell.metadata.get("mystnb", {}).get("figure", {}).get("name"):
            found[name] = "".join(output.get("data", {}).get("text/csv", "") for output in cell.get("outputs", ()))
    return found


def _shows(figures: list[str], drawn: Mapping[str, str], about: list[str], given: Mapping) -> str:
    """The figure that is drawn from most numbers of what a verdict is about, if any.

    Those of a page on one model, run or corpus do not name it; what stands beside it is named.
    """
    # A shipped model that was fine-tuned is named by its corpus: MODEL-on-CORPUS.
    subject = _subject(about).rpartition("-on-")[2]
    values = [given.get(name) for name in OWN]
    own = [one for value in values for one in (value if isinstance(value, list) else [value])]
    # Not a part of another name.
    names = re.compile(rf"(?<![\w-]){re.escape(subject)}(?![\w-])")
    counts = {figure: len(names.findall(drawn[figure])) for figure in figures}
    named = sorted(filter(counts.get, figures), key=counts.get, reverse=True)
    of_page = figures if about and about[0] in (*own, f"{given.get('model')} on {given.get('data')}") else []
    return next(iter([*named, *of_page]), "")
