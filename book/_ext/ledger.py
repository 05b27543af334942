"""The ledger: every claim of the papers with its verdicts in the pages.

A Sphinx extension (``_config.yml`` names it). ``{ledger}`` is the table, which ``book/_static/ledger.js`` sorts and
filters; ``{verdict-counts}`` says how many verdicts there are of each kind.
"""

import html
from collections.abc import Mapping
from pathlib import Path

import pandas as pd
from docutils import nodes
from pages import executed
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from analysis_lib.book.verdicts import verdicts
from analysis_lib.metrics.intervals import CONFIDENCE
from analysis_lib.papers import claims

NOT_RUN = "not run"
KINDS = (claims.HOLDS, claims.FAILS, claims.UNDECIDED, NOT_RUN)
# What a verdict is about.
GROUPS = ("model", "run", "dataset", "variant", "classes", "stage")
TABLE = """\
<div class="ledger-wrap" tabindex="0" role="region" aria-label="The claims ledger">
<table class="ledger table">
<thead><tr>{heads}</tr></thead>
<tbody>
{rows}
</tbody>
</table>
</div>
"""


def ledger(pages: Mapping[str, Path]) -> pd.DataFrame:
    """Every claim of the papers, with each of its verdicts in these executed notebooks.

    Args:
        pages: by the name of the page.

    Returns:
        One row per verdict, and one per claim without any: the fields of a claim, paper, on (what the verdict is
        about), model, value, ci_low, ci_high, p, verdict (``not run`` where there is none), corrected (the verdict
        after Holm, over all rows), judged_by (the page) and table (the name of the table on it).
    """
    by_page = [verdicts([path]).assign(judged_by=name) for name, path in pages.items()]
    rows = pd.concat(by_page, ignore_index=True)
    known = pd.DataFrame([vars(claim) for paper in claims.PAPERS for claim in claims.load(paper).values()])
    known["paper"] = known["id"].str.partition("-")[0].map(claims.PAPERS)
    about = rows.reindex(columns=GROUPS).astype(object).to_numpy()
    rows["on"] = [", ".join(str(value) for value in values if not pd.isna(value)) for values in about]
    rows["corrected"] = claims.corrected(rows)
    columns = ["id", "model", "on", "value", "ci_low", "ci_high", "p", "verdict", "corrected", "judged_by", "table"]
    found = known.merge(rows.reindex(columns=columns), on="id", how="left")
    found["judged_by"] = found["judged_by"].fillna(found["page"])
    return found.fillna({"verdict": NOT_RUN, "corrected": NOT_RUN, "on": "", "table": ""})


class Ledger(SphinxDirective):
    """A row for each claim and what it is judged on."""

    def run(self) -> list[nodes.Node]:
        rows = ledger(executed(self.env)).to_dict("records")
        heads = ("verdict", "claim", "judged on", "number that decides", "holds if", "in the paper")
        heads = "".join(f'<th scope="col">{head}</th>' for head in heads)
        return [nodes.raw("", TABLE.format(heads=heads, rows="\n".join(map(_row, rows))), format="html")]


def _row(row: dict) -> str:
    text = {name: html.escape(str(value)) for name, value in row.items()}
    after = "" if row["corrected"] == row["verdict"] else f"<br><small>after Holm: {text['corrected']}</small>"
    anchor = f"#{text['table']}" if row["table"] else ""
    number = "" if pd.isna(row["value"]) else f"{row['value']:z.3f}"
    interval = "" if pd.isna(row["ci_low"]) else f" [{row['ci_low']:z.3f}, {row['ci_high']:z.3f}]"
    cells = {
        "verdict": f"{text['verdict']}{after}",
        "claim": f'<a href="{text["judged_by"]}.html{anchor}">{text["sentence"]}</a>',
        "on": text["on"],
        "number": f"{number}{interval}",
        "bound": f"{text['direction']} {row['bound']:g}",
        "source": f"{text['paper']}, {text['place']}; {text['setting']}",
    }
    sort = {"number": f' data-sort="{number}"'}
    shown = "".join(f"<td{sort.get(name, '')}>{cell}</td>" for name, cell in cells.items())
    return f'<tr data-verdict="{text["verdict"]}" data-paper="{text["paper"]}">{shown}</tr>'


class VerdictCounts(SphinxDirective):
    """How many verdicts there are of each kind, by paper, and what multiplicity makes of them."""

    def run(self) -> list[nodes.Node]:
        rows = ledger(executed(self.env))
        counts = rows.groupby(["paper", "verdict"], sort=False).size().unstack(fill_value=0)
        counts = counts.reindex(columns=KINDS, fill_value=0)
        lines = [f"| {' | '.join(('paper', *KINDS))} |", "|:---|" + "---:|" * len(KINDS)]
        lines += [f"| {paper} | {' | '.join(map(str, row))} |" for paper, *row in counts.itertuples()]
        judged = rows[rows["verdict"] != NOT_RUN]
        tested, left = judged["p"].notna().sum(), (judged["corrected"] == claims.HOLDS).sum()
        models = ", ".join(f"`{name}`" for name in judged["model"].dropna().unique())
        lines.append(
            f"\nThere are {len(judged)} verdicts on {judged['id'].nunique()} claims, of {rows['id'].nunique()}, on "
            f"{models} and on models trained for the purpose. Of the "
            f"{tested} with an interval, {tested * (1 - CONFIDENCE) / 2:.0f} would hold by chance if every number lay "
            f"at its bound; corrected for all of them at once (Holm), {left} hold."
        )
        return self.parse_text_to_nodes("\n".join(lines))


def setup(app: Sphinx) -> dict[str, bool]:
    """What Sphinx calls when it loads the extension."""
    app.add_directive("ledger", Ledger)
    app.add_directive("verdict-counts", VerdictCounts)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
