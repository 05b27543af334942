"""The ledger: every claim of the papers with its verdicts in the pages.

A Sphinx extension (``_config.yml`` names it). ``{ledger}`` is a line for each claim, which
``book/_static/ledger.js`` filters and puts in order; ``{claim-counts}`` says of how many claims
what was found on the paper's own setting, or with the argument ``elsewhere`` on others. In the
sentences of a ``{synthesis}``, ``[CLAIM on MODEL: VERDICT, FORMAT]`` is a number, and
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

from analysis_book.build.ledger import MIXED, NOT_RUN, WITHOUT, by_chance, ledger, outcomes
from analysis_book.figures.verdicts import about, chip_group, claim_line
from analysis_book.papers import claims

MEASURED = re.compile(
    r"\[(?P<claim>\w+-[\w-]+)(?: on (?P<on>[^\]:]+): (?P<verdict>[a-z ]+)(?:, (?P<form>\S+))?)?\]"
)
JUDGED = (*claims.DECIDED, claims.UNDECIDED, claims.NO_INTERVAL)
KINDS = (
    claims.HOLDS,
    claims.SMALL,
    MIXED,
    claims.FAILS,
    claims.UNDECIDED,
    WITHOUT,
    NOT_RUN,
)
# Outcomes of claims that were not judged.
UNJUDGED = [WITHOUT, NOT_RUN]
# With the place of its page in the book.
_PLACED = '<details data-page="{}"'
HEADS = ("claim", "on the paper’s own setting", "on other models or texts")


@functools.cache
def gathered(environment: BuildEnvironment) -> pd.DataFrame:
    """The ledger of the book, gathered once."""
    return ledger(executed(environment))


class Ledger(SphinxDirective):
    """By paper, a line for each claim: a chip for each of its verdicts, which opens."""

    def run(self) -> list[nodes.Node]:
        parts = []
        pages = [*executed(self.env)]
        for paper, of_paper in gathered(self.env).groupby("paper", sort=False):
            is_ours = of_paper["ours"].all()
            lines = []
            for _, rows in of_paper.groupby("id", sort=False):
                page = rows["page"].iloc[0]
                place = pages.index(page) if page in pages else len(pages)
                lines.append(self._line(rows).replace("<details", _PLACED.format(place), 1))
            title = "Claims of our own" if is_ours else paper
            kind = " ours" if is_ours else ""
            heads = "".join(f"<span>{head}</span>" for head in HEADS[: 1 if is_ours else 3])
            parts.append(
                f'<h2>{html.escape(title)}</h2><div class="verdicts ledger{kind}">'
                f'<div class="heads" aria-hidden="true">{heads}</div>{"".join(lines)}</div>'
            )
        return [nodes.raw("", "".join(parts), format="html")]

    def _line(self, rows: pd.DataFrame) -> str:
        claim = rows.iloc[0]
        if (rows["verdict"] == NOT_RUN).all():
            return _not_run(claim)
        addresses = []
        for row in rows.itertuples():
            addresses.append(f"{row.judged_by}.html#{row.figure or row.id}")
        missing = {}
        if not claim["ours"] and (rows["scope"] == claims.ELSEWHERE).all():
            missing = {claims.OWN_SETTING: f"{NOT_RUN}: needs {_needs(claim)}"}
        return claim_line(rows, addresses, missing)


def _needs(claim: pd.Series) -> str:
    """What the paper judges a claim on, in a few words."""
    models = [model for model in claim["models"] if model != claims.ANY]
    names = models or claim["corpora"]
    return ", ".join(names) if len(names) < 4 else "a model of the paper"


def _not_run(claim: pd.Series) -> str:
    """The line of a claim without a verdict."""
    scope = claims.OURS if claim["ours"] else claims.OWN_SETTING
    chips = chip_group(scope, f'<span class="chip none">{NOT_RUN}</span>')
    needs = html.escape(
        f"Number: {claim['quantity']}. It needs {claim['needs']}. Source: {claim['source']}."
    )
    return (
        f'<details class="claim" id="{claim["id"]}"><summary>{html.escape(claim["claim"])}'
        f'<span class="chips">{chips}</span></summary><p>{needs}</p></details>'
    )


class Counts(SphinxDirective):
    """The number of claims with each outcome, by paper; ``elsewhere`` for other models or texts."""

    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        elsewhere = self.arguments == ["elsewhere"]
        by_paper = outcomes(gathered(self.env), elsewhere).groupby("paper", sort=False)
        counts = by_paper["outcome"].value_counts().unstack(fill_value=0)
        counts = counts.reindex(columns=KINDS, fill_value=0)
        judged = counts.drop(columns=UNJUDGED).sum(axis=1)
        shown = counts.loc[:, counts.any()]
        heads = ("claims of", *shown.columns, "by chance")
        lines = [f"| {' | '.join(heads)} |", "|:---|" + "---:|" * (len(heads) - 1)]
        for paper, *row in shown.itertuples():
            chance = f"≤ {by_chance(judged[paper]):.1f}"
            lines.append(f"| {paper} | {' | '.join(map(str, row))} | {chance} |")
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
            held = rows["verdict"].isin((claims.HOLDS, claims.SMALL)).groupby(about(rows)).all()
            return f"{held.sum()} of {len(held)}"
        if len(rows):
            rows = rows[[name == named["on"] for name in about(rows)]]
        if len(rows) != 1 or rows["verdict"].item() != named["verdict"]:
            raise LookupError(named[0][1:-1])
        value = rows["value"].item()
        if named["form"] == "negated":
            return format(-value, ".2f")
        return format(value, named["form"] or ".2f")


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension with Sphinx."""
    app.add_directive("ledger", Ledger)
    app.add_directive("claim-counts", Counts)
    app.add_directive("synthesis", Synthesis)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
