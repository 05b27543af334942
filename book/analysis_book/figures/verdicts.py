"""Verdicts on claims, a line for each claim: its sentence, a chip for each model, the interval
beside the bound.
"""

import json
import re
from html import escape

import numpy as np
import pandas as pd

# What a verdict can be: beyond the bound, short of it, both inside the interval; a number without
# an interval; none.
OUTCOMES = ("holds", "does not hold", "undecided", "no interval", "not applicable")
# What a row is about, in the order in which a reader is told.
GROUPS = ("model", "dataset", "variant", "classes", "stage")
_LINE = """<details class="claim" id="{id}"><summary>{claim}<span class="chips">{chips}</span></summary>
<table><thead><tr>{heads}</tr></thead>
<tbody>{rows}</tbody></table>
<p><b>Number:</b> {quantity}{formula}.</p><p><b>Bound:</b> the claim holds {direction} {bound:g}. {rationale}</p>
<p><b>Source:</b> {source}.</p></details>"""  # noqa: E501
_FORMULA = ' (<a href="{up}notation.html#notation-{name}">formula</a>)'
# In a reason, the id of a claim.
_OTHER = re.compile(r"\b(?:fosse|godey|maruta)-[a-z-]+[a-z]")
# Never parted by the end of a line, but where one alone is as wide as the page.
_CHIP = '<span class="verdict"><span class="chip {kind}">{text}</span>{interval}</span>'
_HEADS = ("judged on", "verdict", "number [95 % interval]", "measured on", "p")
_WIDTH = 84


class Verdicts:
    """The verdicts of a page: HTML that opens without a script, in a notebook too; text elsewhere.

    Args:
        rows: those of ``claims.verdicts``, with the column after: the verdict after correction.
    """

    def __init__(self, rows: pd.DataFrame):
        self.rows = rows

    def _repr_mimebundle_(self, **_: object) -> tuple[dict, dict]:
        # In full precision, for those who gather the verdicts of the pages.
        records = json.loads(
            self.rows.drop(columns="rationale", errors="ignore").to_json(
                orient="records", double_precision=15
            )
        )
        return {"text/html": self._repr_html_(), "text/plain": repr(self)}, {"verdicts": records}

    def __repr__(self) -> str:
        told = self.rows.assign(on=about(self.rows), number=self.rows.apply(number, axis=1))
        return told[["on", "verdict", "number", "claim"]].to_string(index=False)

    def _repr_html_(self) -> str:
        lines = [claim_line(part) for _, part in self.rows.groupby("id", sort=False)]
        return f'<div class="verdicts">{"".join(lines)}</div>'


def claim_line(rows: pd.DataFrame, addresses: list[str] | None = None) -> str:
    """The verdicts on one claim, as HTML; with addresses, each leads to where it was reached."""
    names, first = about(rows), rows.iloc[0]
    ends = np.append(rows[["ci_low", "value", "ci_high"]].to_numpy(float), first["bound"])
    span = np.nanmin(ends), np.nanmax(ends)
    chips, body = [], []
    for name, row, address in zip(
        names, rows.to_dict("records"), addresses or [""] * len(rows), strict=True
    ):
        lost = row["after"] != row["verdict"]
        kind = row["verdict"].replace(" ", "-") + " lost" * lost
        verdict = row["verdict"] + f" (corrected: {row['after']})" * lost
        text = f"{escape(name)}{': ' * bool(name)}{row['verdict']}"
        chips.append(_CHIP.format(kind=kind, text=text, interval=_interval(row, span)))
        on = (
            f'<a href="{escape(address)}">{escape(name or "here")}</a>' if address else escape(name)
        )
        p = "" if np.isnan(row["p"]) else "&lt; 0.0001" if row["p"] < 1e-4 else f"{row['p']:.4f}"
        # A part of a corpus stands behind a colon.
        cells = (
            on,
            verdict,
            number(row),
            escape(re.sub(r"(\w):(?=\w)", r"\1, ", row["sample"])),
            p,
        )
        body.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    words = {
        name: escape(str(first[name]))
        for name in ("id", "claim", "quantity", "rationale", "source", "direction")
    }
    up = "" if addresses else "../"
    words["rationale"] = _OTHER.sub(
        rf'<a href="{up}ledger.html#\g<0>">another claim</a>', words["rationale"]
    )
    words["quantity"] = _OTHER.sub("another claim", words["quantity"])
    heads = "".join(f'<th scope="col">{head}</th>' for head in _HEADS)
    words |= {
        "chips": "".join(chips),
        "heads": heads,
        "rows": "".join(body),
        "bound": first["bound"],
        "formula": "",
    }
    if isinstance(first.get("formula"), str) and first["formula"]:
        name = first["formula"].replace("_", "-")
        words["formula"] = _FORMULA.format(up=up, name=name)
    return _LINE.format(**words)


def about(rows: pd.DataFrame) -> list[str]:
    """What each of the rows is about, in words: of the columns that say so, those in which they
    differ.
    """
    there = [name for name in GROUPS if name in rows and rows[name].notna().any()]
    telling = [
        name for name in there if name == "model" or rows[name].nunique(dropna=False) > 1
    ] or there[:1]
    texts = rows[telling].astype(object)
    if "classes" in texts:
        texts["classes"] = texts["classes"].map("{:g} classes".format, na_action="ignore")
    return [
        ", ".join(str(v) for v in row if not pd.isna(v)) for row in texts.itertuples(index=False)
    ]


def number(row: dict | pd.Series) -> str:
    """A value and its interval."""
    if np.isnan(row["value"]):
        return "none"
    ends = "" if np.isnan(row["ci_low"]) else f" [{row['ci_low']:z.3f}, {row['ci_high']:z.3f}]"
    return f"{row['value']:z.3f}{ends}"


def _interval(row: dict, span: tuple[float, float]) -> str:
    """An interval against its bound, drawn in one line of text; the same scale for all rows of a
    claim.
    """
    if np.isnan(row["ci_low"]) or not span[1] > span[0]:
        return ""
    names = ("ci_low", "ci_high", "value", "bound")
    low, high, value, bound = (
        4 + (_WIDTH - 8) * (row[name] - span[0]) / (span[1] - span[0]) for name in names
    )
    side = (
        f'x="{bound:.1f}" width="{_WIDTH - bound:.1f}"'
        if row["direction"] == "above"
        else f'width="{bound:.1f}"'
    )
    return (
        f'<svg class="interval" viewBox="0 0 {_WIDTH} 14" width="{_WIDTH}" height="14" role="img" '
        f'aria-label="{number(row)}, bound {row["bound"]:g}"><rect {side} height="14" '
        'fill="currentColor" '
        f'opacity="0.1"/><path d="M{bound:.1f} 0v14" stroke="currentColor" stroke-dasharray="2 2"/>'
        f'<path d="M{low:.1f} 7H{max(high, low + 1):.1f}" stroke="currentColor" stroke-width="2"/>'
        f'<circle cx="{value:.1f}" cy="7" r="3" fill="currentColor"/></svg>'
    )
