"""The ledger: every claim of the papers with its verdicts in the pages.

A Sphinx extension (``_config.yml`` names it). ``{ledger}`` is a line for each claim, which
``book/_static/ledger.js`` filters; ``{claim-counts}`` says of how many claims what was found. In
the sentences of a ``{synthesis}``, ``[CLAIM on MODEL: VERDICT, FORMAT]`` is a number, and
``[CLAIM]`` on how many models of how many the claim holds.
"""

import functools
import html
import re

import pandas as pd
from docutils import nodes
from notebooks import executed
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.docutils import SphinxDirective

from analysis_book.build.ledger import NOT_RUN, ledger, outcomes
from analysis_book.figures.verdicts import about, claim_line
from analysis_book.papers import claims

MEASURED = re.compile(
    r"\[(?P<claim>\w+-[\w-]+)(?: on (?P<on>[^\]:]+): (?P<verdict>[a-z ]+)(?:, (?P<form>\S+))?)?\]"
)
JUDGED = (claims.HOLDS, claims.FAILS, claims.UNDECIDED, claims.NO_INTERVAL)
KINDS = ("holds", "mixed", claims.FAILS, claims.UNDECIDED, "without a verdict", NOT_RUN)


@functools.cache
def gathered(environment: BuildEnvironment) -> pd.DataFrame:
    """The ledger of the book, gathered once."""
    return ledger(executed(environment))


class Ledger(SphinxDirective):
    """By paper, a line for each claim: a chip for each of its verdicts, which opens."""

    def run(self) -> list[nodes.Node]:
        parts = []
        for paper, of_paper in gathered(self.env).groupby("paper", sort=False):
            lines = [self._line(rows) for _, rows in of_paper.groupby("id", sort=False)]
            parts.append(
                f'<h2>{html.escape(paper)}</h2><div class="verdicts ledger">{"".join(lines)}</div>'
            )
        return [nodes.raw("", "".join(parts), format="html")]

    def _line(self, rows: pd.DataFrame) -> str:
        if (rows["verdict"] == NOT_RUN).all():
            claim = rows.iloc[0]
            needs = html.escape(
                f"Number: {claim['quantity']}. It needs {claim['needs']}. Source: "
                f"{claim['source']}."
            )
            head = (
                f'{html.escape(claim["claim"])}<span class="chips"><span '
                f'class="chip">{NOT_RUN}</span></span>'
            )
            return (
                '<details class="claim" '
                f'id="{claim["id"]}"><summary>{head}</summary><p>{needs}</p></details>'
            )
        addresses = []
        for row in rows.itertuples():
            addresses.append(f"{row.judged_by}.html#{row.figure or row.id}")
        return claim_line(rows, addresses)


class Counts(SphinxDirective):
    """The number of claims with each outcome, by paper."""

    def run(self) -> list[nodes.Node]:
        by_paper = outcomes(gathered(self.env)).groupby("paper", sort=False)
        counts = by_paper["outcome"].value_counts().unstack(fill_value=0)
        counts = counts.reindex(columns=KINDS, fill_value=0)
        lines = [f"| {' | '.join(('claims of', *KINDS))} |", "|:---|" + "---:|" * len(KINDS)]
        for paper, *row in counts.itertuples():
            lines.append(f"| {paper} | {' | '.join(map(str, row))} |")
        return self.parse_text_to_nodes("\n".join(lines))


class Synthesis(SphinxDirective):
    """Sentences on the verdicts, if all numbers are there with the verdicts that they name."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        try:
            text = MEASURED.sub(self._number, "\n".join(self.content))
        except LookupError as missing:
            text = (
                "This site was built with other models or texts than those that this section "
                f"is about ({missing})."
            )
        return self.parse_text_to_nodes(text)

    def _number(self, named: re.Match) -> str:
        rows = gathered(self.env)
        rows = rows[(rows["id"] == named["claim"]) & rows["verdict"].isin(JUDGED)]
        if not named["on"] and len(rows):
            held = (rows["verdict"] == claims.HOLDS).groupby(about(rows)).all()
            return f"{held.sum()} of {len(held)}"
        if len(rows):
            rows = rows[[name == named["on"] for name in about(rows)]]
        if len(rows) != 1 or rows["verdict"].item() != named["verdict"]:
            raise LookupError(named[0][1:-1])
        return format(rows["value"].item(), named["form"] or ".2f")


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension with Sphinx."""
    app.add_directive("ledger", Ledger)
    app.add_directive("claim-counts", Counts)
    app.add_directive("synthesis", Synthesis)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
