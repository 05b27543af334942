"""Verdicts on claims, a line for each: sentence, a chip for each model, intervals and bound.

What a paper says of a model is judged on that model, so that the chips of a claim stand in two
groups: on the paper's own setting, and on others.
"""

import itertools
import json
import re
from collections.abc import Mapping
from html import escape

import numpy as np
import pandas as pd

# What a verdict can be: beyond the bound; on the claimed side, but not beyond a bound of our own;
# short of it; both inside the interval; a number without an interval; none.
OUTCOMES = (
    "holds",
    "holds, small",
    "does not hold",
    "undecided",
    "no interval",
    "not applicable",
)
# What a verdict is about: the models and texts that the paper judges its claim on, others, or a
# claim that no paper makes.
SCOPES = ("paper", "elsewhere", "ours")
_LABELS = {"paper": "paper’s own setting", "elsewhere": "other models or texts", "ours": ""}
# The columns that say what a row is about, in the order in which they are shown.
GROUPS = ("model", "dataset", "variant", "classes", "stage")
_LINE = """<details class="claim" id="{id}"><summary>{claim}<span class="chips">{chips}</span></summary>
<table><thead><tr>{heads}</tr></thead>
<tbody>{rows}</tbody></table>
<p><b>Number:</b> {quantity}{formula}.</p><p><b>Bound:</b> the claim holds {direction} {bound:g}{small}. {rationale}</p>
<p><b>Source:</b> {source}.</p></details>"""  # noqa: E501
_FORMULA = ' (<a href="{up}notation.html#notation-{name}">formula</a>)'
# In a reason, the id of a claim.
_OTHER = re.compile(r"\b(?:fosse|godey|maruta)-[a-z-]+[a-z]")
# Never parted by the end of a line, but where one alone is as wide as the page.
_CHIP = '<span class="verdict"><span class="chip {kind}">{text}</span>{interval}</span>'
_GROUP = '<span class="scope {scope}"><span class="label">{label}</span>{chips}</span>'
_SMALL = "; between {turn:g} and that, it holds, but less than we asked for"
_HEADS = ("judged on", "verdict", "number [95 % interval]", "measured on", "p")
_WIDTH = 84


class Verdicts:
    """The verdicts of a page: HTML that opens without a script, in a notebook too; text elsewhere.

    Args:
        rows: those of ``claims.verdicts``, with the columns after, the verdict after correction,
            and scope, one of ``SCOPES``.
    """

    def __init__(self, rows: pd.DataFrame):
        self.rows = rows

    def _repr_mimebundle_(self, **_: object) -> tuple[dict, dict]:
        rows = self.rows.drop(columns="rationale", errors="ignore")
        # In full precision, for those who gather the verdicts of the pages.
        records = json.loads(rows.to_json(orient="records", double_precision=15))
        return {"text/html": self._repr_html_(), "text/plain": repr(self)}, {"verdicts": records}

    def __repr__(self) -> str:
        numbers = self.rows.apply(number, axis=1)
        table = self.rows.assign(on=about(self.rows), number=numbers)
        return table[["on", "verdict", "number", "claim"]].to_string(index=False)

    def _repr_html_(self) -> str:
        lines = [claim_line(part) for _, part in self.rows.groupby("id", sort=False)]
        return f'<div class="verdicts">{"".join(lines)}</div>'


def claim_line(
    rows: pd.DataFrame,
    addresses: list[str] | None = None,
    missing: Mapping[str, str] | None = None,
) -> str:
    """The verdicts on one claim, as HTML; with addresses, each leads to where it was reached.

    Args:
        missing: by the ``SCOPES`` without a verdict, what stands in place of its chips.
    """
    first = rows.iloc[0]
    ends = np.append(rows[["ci_low", "value", "ci_high"]].to_numpy(float), first["bound"])
    span = np.nanmin(ends), np.nanmax(ends)
    chips: dict[str, list[str]] = {scope: [] for scope in SCOPES}
    for scope, text in (missing or {}).items():
        chips[scope] = [_CHIP.format(kind="none", text=escape(text), interval="")]
    body: dict[str, list[str]] = {scope: [] for scope in SCOPES}
    links = addresses or [""] * len(rows)
    for name, row, address in zip(about(rows), rows.to_dict("records"), links, strict=True):
        body[row["scope"]].append(_row(name, row, address))
        if not addresses:
            chips[row["scope"]].append(_chip(name, row, _interval(row, span)))
    if addresses:
        for scope, of_scope in rows.assign(on=about(rows)).groupby("scope"):
            chips[scope] = _chips_by_verdict(of_scope)
    up = "" if addresses else "../"
    link = rf'<a href="{up}ledger.html#\g<0>">another claim</a>'
    formula = ""
    if isinstance(first.get("formula"), str) and first["formula"]:
        formula = _FORMULA.format(up=up, name=first["formula"].replace("_", "-"))
    small = ""
    if not pd.isna(first.get("turn")):
        small = _SMALL.format(turn=first["turn"])
    return _LINE.format(
        id=escape(str(first["id"])),
        claim=escape(str(first["claim"])),
        chips="".join(chip_group(scope, "".join(chips[scope])) for scope in SCOPES),
        heads="".join(f'<th scope="col">{head}</th>' for head in _HEADS),
        rows="".join(itertools.chain(*body.values())),
        quantity=_OTHER.sub("another claim", escape(str(first["quantity"]))),
        formula=formula,
        direction=escape(str(first["direction"])),
        bound=first["bound"],
        small=small,
        rationale=_OTHER.sub(link, escape(str(first["rationale"]))),
        source=escape(str(first["source"])),
    )


def chip_group(scope: str, chips: str) -> str:
    """The chips of the verdicts on one of the ``SCOPES``, with its name; nothing without any."""
    if not chips:
        return ""
    return _GROUP.format(scope=scope, label=_LABELS[scope], chips=chips)


def _chips_by_verdict(rows: pd.DataFrame) -> list[str]:
    """A chip for each verdict, with all that it was reached on."""
    chips = []
    for _, alike in rows.groupby(["verdict", "after"], sort=False):
        names = "; ".join(dict.fromkeys(alike["on"]))
        chips.append(_chip(names, alike.iloc[0], ""))
    return chips


def _chip(name: str, row: dict | pd.Series, interval: str) -> str:
    """The verdict on a model, and its interval if that is drawn."""
    kind = row["verdict"].replace(",", "").replace(" ", "-")
    if row["after"] != row["verdict"]:
        kind += " lost"
    text = row["verdict"]
    if name:
        text = f"{escape(name)}: {text}"
    return _CHIP.format(kind=kind, text=text, interval=interval)


def _row(name: str, row: dict, address: str) -> str:
    """The verdict on a model as a row of a table."""
    on = escape(name)
    if address:
        on = f'<a href="{escape(address)}">{escape(name or "here")}</a>'
    verdict = row["verdict"]
    if row["after"] != verdict:
        verdict += f" (corrected: {row['after']})"
    p = ""
    if row["p"] < 1e-4:
        p = "&lt; 0.0001"
    elif not np.isnan(row["p"]):
        p = f"{row['p']:.4f}"
    # Print `corpus:split` as `corpus, split`.
    sample = re.sub(r"(\w):(?=\w)", r"\1, ", row["sample"])
    cells = (on, verdict, number(row), escape(sample), p)
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def about(rows: pd.DataFrame) -> list[str]:
    """The model, data and the like of each row, in words, of the columns in which rows differ."""
    there = [name for name in GROUPS if name in rows and rows[name].notna().any()]
    differing = []
    for name in there:
        if name == "model" or rows[name].nunique(dropna=False) > 1:
            differing.append(name)
    texts = rows[differing or there[:1]].astype(object)
    if "classes" in texts:
        texts["classes"] = texts["classes"].map("{:g} classes".format, na_action="ignore")
    names = []
    for row in texts.itertuples(index=False):
        names.append(", ".join(str(value) for value in row if not pd.isna(value)))
    return names


def number(row: dict | pd.Series) -> str:
    """A value and its interval."""
    if np.isnan(row["value"]):
        return "none"
    ends = "" if np.isnan(row["ci_low"]) else f" [{row['ci_low']:z.3f}, {row['ci_high']:z.3f}]"
    return f"{row['value']:z.3f}{ends}"


def _interval(row: dict, span: tuple[float, float]) -> str:
    """An interval against its bound, drawn in one line of text.

    All rows of a claim have the same scale.
    """
    if np.isnan(row["ci_low"]) or not span[1] > span[0]:
        return ""

    def scaled(number: float) -> float:
        return 4 + (_WIDTH - 8) * (number - span[0]) / (span[1] - span[0])

    low = scaled(row["ci_low"])
    high = scaled(row["ci_high"])
    value = scaled(row["value"])
    bound = scaled(row["bound"])
    side = f'width="{bound:.1f}"'
    if row["direction"] == "above":
        side = f'x="{bound:.1f}" width="{_WIDTH - bound:.1f}"'
    return (
        f'<svg class="interval" viewBox="0 0 {_WIDTH} 14" width="{_WIDTH}" height="14" role="img" '
        f'aria-label="{number(row)}, bound {row["bound"]:g}">'
        f'<rect {side} height="14" fill="currentColor" opacity="0.1"/>'
        f'<path d="M{bound:.1f} 0v14" stroke="currentColor" stroke-dasharray="2 2"/>'
        f'<path d="M{low:.1f} 7H{max(high, low + 1):.1f}" stroke="currentColor" stroke-width="2"/>'
        f'<circle cx="{value:.1f}" cy="7" r="3" fill="currentColor"/></svg>'
    )
