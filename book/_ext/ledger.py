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
        return claim_line(
            rows, [f"{row.judged_by}.html#{row.figure or row.id}" for row in rows.itertuples()]
        )


class Counts(SphinxDirective):
    """Of how many claims of each paper what was found."""

    def run(self) -> list[nodes.Node]:
        found = outcomes(gathered(self.env))
        counts = found.groupby("paper", sort=False)["outcome"].value_counts().unstack(fill_value=0)
        counts = counts.reindex(columns=KINDS, fill_value=0)
        lines = [f"| {' | '.join(('claims of', *KINDS))} |", "|:---|" + "---:|" * len(KINDS)]
        lines += [
            f"| {paper} | {' | '.join(map(str, row))} |" for paper, *row in counts.itertuples()
        ]
        return self.parse_text_to_nodes("\n".join(lines))


class Synthesis(SphinxDirective):
    """Sentences on what was found; where a number of theirs is not there, or its verdict is another
    one, none.
    """

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

    def _number(self, found: re.Match) -> str:
        rows = gathered(self.env).query("id == @found['claim'] and verdict in @JUDGED")
        if not found["on"] and len(rows):
            held = (rows["verdict"] == claims.HOLDS).groupby(about(rows)).all()
            return f"{held.sum()} of {len(held)}"
        rows = rows[[name == found["on"] for name in about(rows)]] if len(rows) else rows
        if len(rows) != 1 or rows["verdict"].item() != found["verdict"]:
            raise LookupError(found[0][1:-1])
        return format(rows["value"].item(), found["form"] or ".2f")


def setup(app: Sphinx) -> dict[str, bool]:
    """What Sphinx calls when it loads the extension."""
    app.add_directive("ledger", Ledger)
    app.add_directive("claim-counts", Counts)
    app.add_directive("synthesis", Synthesis)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
