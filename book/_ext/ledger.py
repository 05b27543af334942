"""The ledger: every claim of the papers with its verdicts in the pages.

A Sphinx extension (``_config.yml`` names it). ``{ledger}`` is the table, which ``book/_static/ledger.js`` sorts and
filters; ``{claims-matrix}`` has a sign for each verdict, by claim and model; ``{verdict-counts}`` says how many there
are of each kind, and ``{measured-models}`` on which models.
"""

import functools
import html
import re

import pandas as pd
from docutils import nodes
from pages import executed
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.docutils import SphinxDirective

from analysis_lib.book.ledger import NOT_RUN, ledger
from analysis_lib.book.parameters import read_notebook
from analysis_lib.metrics.intervals import CONFIDENCE
from analysis_lib.models import known_models
from analysis_lib.papers import claims
from analysis_lib.training.recipes import RECIPES

KINDS = (claims.HOLDS, claims.FAILS, claims.UNDECIDED, NOT_RUN)
TABLE = """\
<div class="pst-scrollable-table-container" role="region" aria-label="The claims ledger">
<table class="ledger table">
<thead><tr>{heads}</tr></thead>
<tbody>
{rows}
</tbody>
</table>
</div>
"""
MATRIX = """\
<table>
<caption><a href="{page}.html">{title}</a></caption>
<tbody>
{rows}
</tbody>
</table>
"""
SIGNS = {claims.HOLDS: "✓", claims.FAILS: "✗", claims.UNDECIDED: "?"}


@functools.cache
def gathered(environment: BuildEnvironment) -> pd.DataFrame:
    """The ledger of the book, gathered once; a block of random weights has the name of a model that it is not."""
    rows = ledger(executed(environment))
    blocks = rows["judged_by"].str.startswith("untrained/") & rows["model"].notna()
    rows.loc[blocks, ["model", "on", "subject"]] += ", untrained block"
    return rows


def _address(row: dict, shown: str = "") -> str:
    """Where a number is shown, else the table that judges it; for a claim that was not run, the page that would."""
    place = shown or row["table"]
    return html.escape(f"{row['judged_by']}.html" + (f"#{place}" if place else ""))


class Ledger(SphinxDirective):
    """A row for each claim and what it is judged on."""

    def run(self) -> list[nodes.Node]:
        rows = map(_row, gathered(self.env).to_dict("records"))
        heads = ("verdict", "number that decides", "claim", "judged on", "holds if", "in the paper")
        heads = "".join(f'<th scope="col">{head}</th>' for head in heads)
        return [nodes.raw("", TABLE.format(heads=heads, rows="\n".join(rows)), format="html")]


def _row(row: dict) -> str:
    text = {name: html.escape(str(value)) for name, value in row.items()}
    after = "" if row["corrected"] == row["verdict"] else f"<br><small>over all (Holm): {text['corrected']}</small>"
    number = "" if pd.isna(row["value"]) else f"{row['value']:z.3f}"
    interval = claims.interval(row["ci_low"], row["ci_high"], row["draws"])
    # To the figure that shows it; the claim leads to the table that judges it.
    if number and row["figure"]:
        number = f'<a href="{_address(row, row["figure"])}">{number}</a>'
    cells = {
        "verdict": f"{text['verdict']}{after}",
        "number": f"{number}{interval}",
        "claim": f'<a href="{_address(row)}">{text["sentence"]}</a>',
        "on": text["on"],
        "bound": f"{text['direction']} {row['bound']:g}<br><small>{text['quantity']}</small>",
        "source": f"{text['paper']}, {text['place']}; {text['setting']}",
    }
    sort = {"number": f' data-sort="{row["value"]}"'}
    shown = "".join(f"<td{sort.get(name, '')}>{cell}</td>" for name, cell in cells.items())
    sets = " ".join(f'data-{name}="{text[name]}"' for name in ("verdict", "paper", "subject"))
    return f"<tr {sets}>{shown}</tr>"


class Counts(SphinxDirective):
    """How many verdicts there are of each kind, by paper, and what multiplicity makes of them."""

    def run(self) -> list[nodes.Node]:
        rows = gathered(self.env)
        counts = rows.groupby(["paper", "verdict"], sort=False).size().unstack(fill_value=0)
        counts = counts.reindex(columns=KINDS, fill_value=0)
        lines = [f"| {' | '.join(('paper', *KINDS))} |", "|:---|" + "---:|" * len(KINDS)]
        lines += [f"| {paper} | {' | '.join(map(str, row))} |" for paper, *row in counts.itertuples()]
        judged = rows[rows["verdict"] != NOT_RUN]
        tested, left = judged["p"].notna().sum(), (judged["corrected"] == claims.HOLDS).sum()
        lines.append(
            f"\nThere are {len(judged)} verdicts on {judged['id'].nunique()} claims, of {rows['id'].nunique()}. Of the "
            f"{tested} with an interval, {tested * (1 - CONFIDENCE) / 2:.0f} would hold by chance if every number lay "
            f"at its bound; corrected for all of them at once (Holm), {left} hold."
        )
        return self.parse_text_to_nodes("\n".join(lines))


class Matrix(SphinxDirective):
    """A small table for each page: a row for each model, run or corpus, a column for each claim, signs in its cells."""

    def run(self) -> list[nodes.Node]:
        rows, tables = gathered(self.env), []
        for page, path in executed(self.env).items():
            if len(judged := rows[(rows["judged_by"] == page) & (rows["verdict"] != NOT_RUN)]):
                title = read_notebook(path).cells[0].source.splitlines()[0].removeprefix("# ")
                tables.append(MATRIX.format(page=page, title=html.escape(title), rows="\n".join(_signs(judged))))
        return [nodes.raw("", f'<div class="claims-matrix">{"".join(tables)}</div>', format="html")]


def _signs(judged: pd.DataFrame) -> list[str]:
    """A row for each subject; where one has several verdicts on a claim, one for each thing that these are about."""
    by = "on" if judged.duplicated(["id", "subject"]).any() else "subject"
    names, rows = judged["id"].unique(), []
    for subject, group in judged.groupby(by, sort=False):
        signs = {row["id"]: _sign(row) for row in group.to_dict("records")}
        cells = "".join(f"<td>{signs.get(name, '·')}</td>" for name in names)
        rows.append(f'<tr><th scope="row">{html.escape(subject)}</th>{cells}</tr>')
    return rows


def _sign(row: dict) -> str:
    lost = row["corrected"] != row["verdict"]
    said = row["verdict"] + f" (over all verdicts of the book: {row['corrected']})" * lost
    words = html.escape(f"{said}: {row['sentence']}")
    kind, address = row["verdict"].replace(" ", "-") + " lost" * lost, _address(row, row["figure"])
    return f'<a class="sign {kind}" href="{address}" title="{words}" aria-label="{words}">{SIGNS[row["verdict"]]}</a>'


class Models(SphinxDirective):
    """One sentence on the models that the numbers come from."""

    def run(self) -> list[nodes.Node]:
        given = [read_notebook(path).metadata["analysis_lib"]["parameters"] for path in executed(self.env).values()]
        values = [value for chosen in given for name, value in chosen.items() if re.fullmatch(r"(\w+_)?models?", name)]
        names = dict.fromkeys(name for value in values for name in ([value] if isinstance(value, str) else value))
        known = known_models()
        called = {name: re.split(r": | \(", known.get(name, name))[0] for name in names if name not in RECIPES}
        shown = "; ".join(f"{text} (`{name}`)" for name, text in called.items())
        text = (
            f"The numbers come from {shown}: as others trained them, fine-tuned here, or with random weights. "
            "Small models that are trained for one experiment are named as such."
        )
        return self.parse_text_to_nodes(text)


def setup(app: Sphinx) -> dict[str, bool]:
    """What Sphinx calls when it loads the extension."""
    app.add_directive("ledger", Ledger)
    app.add_directive("verdict-counts", Counts)
    app.add_directive("claims-matrix", Matrix)
    app.add_directive("measured-models", Models)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
