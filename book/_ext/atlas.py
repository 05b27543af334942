"""The atlas: what transformers returns, by type of model.

A Sphinx extension (``_config.yml`` names it). ``{atlas}`` is the field and the card, which
``book/_static/atlas.js`` fills; ``{atlas-figure}`` how many types share each convention,
``{atlas-table}`` all types, and ``{atlas-changes}`` what differs between the last two versions of
transformers.
"""

import html
import json
from collections.abc import Iterable, Mapping

import pandas as pd
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from analysis_book.atlas import cards

# Columns of the table: the others are on the card.
SHOWN = {
    "reads": "reads",
    "first_state": "hidden_states[0]",
    "last_state": "hidden_states[-1]",
    "attention_kind": "attentions hold",
    "row_sums": "rows add up to",
    "attentions_by_default": "by default",
    "left_padding": "[PAD] before a text",
}
COUNTED = (
    "first_state",
    "last_state",
    "state_axes",
    "attentions",
    "attention_kind",
    "row_sums",
    "dropout",
    "default_attention",
    "attentions_by_default",
    "left_padding",
    "left_padding_with_positions",
    "right_padding",
    "rotation",
    "scale",
    "two_calls",
)
# What stands in code for the name of a model.
MODEL = "MODEL"
FEWEST = 3
# Rows of a table that is not folded.
LONGEST = 12
FIELD = """\
<div class="atlas">
<form class="atlas-find" hidden>
<label>Model or type <input name="model" list="atlas-types" autocomplete="off" spellcheck="false"
 placeholder="such as gpt2, or Qwen/Qwen3-0.6B"></label>
<label>or its config.json <input type="file" name="config" accept=".json,application/json"></label>
<datalist id="atlas-types">{options}</datalist>
</form>
<section class="atlas-card" aria-live="polite" aria-label="Card of a type" tabindex="-1"></section>
<script class="atlas-data" type="application/json">{data}</script>
<noscript><p>Without scripts, the table below has the main columns of every type.</p></noscript>
</div>"""
BAR = """\
<li><span class="atlas-bar" style="width: {share:.1f}%"></span>
<a href="#{address}">{words}</a> <span class="count">{count}</span></li>"""


class Field(SphinxDirective):
    """The field in which a model is named, and the card of its type."""

    def run(self) -> list[nodes.Node]:
        rows = cards.load()
        built = rows[rows["result"] == cards.BUILT]
        options = "".join(f'<option value="{html.escape(name)}">' for name in built["type"])
        text = json.dumps(data(), ensure_ascii=False, separators=(",", ":"))
        # No end tag can stand in it.
        text = text.replace("<", r"\u003c")
        return [nodes.raw("", FIELD.format(options=options, data=text), format="html")]


def data() -> dict[str, object]:
    """All that cards say, with each text once."""
    rows = cards.load()
    texts: dict[str, int] = {}

    def number(text: str) -> int:
        return texts.setdefault(text, len(texts))

    before, after = cards.versions()[-2:]
    earlier: dict[str, dict[str, int]] = {}
    for change in cards.changes(before, after).to_dict("records"):
        earlier.setdefault(change["type"], {})[change["fact"]] = number(change["before"])
    types = {}
    failed = {}
    for row in rows.to_dict("records"):
        if row["result"] != cards.BUILT:
            failed[row["type"]] = row["result"]
            continue
        types[row["type"]] = {
            "made": row["class"],
            "reads": row["reads"],
            "cells": [number(row[fact.name]) for fact in cards.FACTS],
            "earlier": earlier.get(row["type"], {}),
            "traps": cards.traps(row),
            "plain": number(cards.plain_lines(row, MODEL)),
            "measured": number(cards.measured_lines(row, MODEL)),
        }
    facts = []
    values: dict[int, list[str]] = {}
    every = [*texts]
    for place, fact in enumerate(cards.FACTS):
        numbers = sorted({each["cells"][place] for each in types.values()})
        surprising = [index for index in numbers if fact.surprises(every[index])]
        facts.append([fact.name, fact.label, fact.expected, surprising])
        values |= {index: cards.values_of(every[index]) for index in numbers}
    return {
        "version": after,
        "before": before,
        "facts": facts,
        "texts": [*texts],
        # What a text says, where it is not one thing.
        "values": {index: said for index, said in values.items() if said != [every[index]]},
        "traps": cards.TRAPS,
        "types": types,
        "failed": failed,
    }


class Figure(SphinxDirective):
    """By convention, how many types have it."""

    def run(self) -> list[nodes.Node]:
        rows = cards.load()
        built = rows[rows["result"] == cards.BUILT]
        parts = []
        for name in COUNTED:
            fact = cards.BY_NAME[name]
            parts.append(f"<h3>{html.escape(fact.label)}</h3>{_bars(name, built[name])}")
        version = rows["transformers"].iloc[0]
        caption = (
            f"How many of {len(built)} types of models share each convention, in transformers "
            f"{version}. A type with several stacks counts for each. Conventions of fewer than "
            f"{FEWEST} types are folded together."
        )
        figure = (
            f'<figure id="fig-atlas" class="atlas-figure"><div>{"".join(parts)}</div>'
            f"<figcaption>{caption}</figcaption></figure>"
        )
        return [nodes.raw("", figure, format="html")]


def counted(cells: Iterable[str]) -> Mapping[str, int]:
    """How many cells say each thing, the most frequent first."""
    counts: dict[str, int] = {}
    for cell in cells:
        for value in cards.values_of(cell):
            counts[value] = counts.get(value, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def _bars(name: str, cells: Iterable[str]) -> str:
    counts = counted(cells)
    most = max(counts.values())
    frequent = {value: count for value, count in counts.items() if count >= FEWEST and value}
    lines = []
    for value, count in frequent.items():
        address = f"{name}={html.escape(value.replace(' ', '+'))}"
        words = html.escape(value)
        share = 100 * count / most
        lines.append(BAR.format(hidden="", share=share, address=address, words=words, count=count))
    rest = len(counts) - len(frequent)
    if rest:
        total = sum(counts.values()) - sum(frequent.values())
        lines.append(f"<li>{rest} rarer <span class='count'>{total}</span></li>")
    return f"<ul>{''.join(lines)}</ul>"


class Types(SphinxDirective):
    """A row for each type; those of which no small model runs are below, with the reason."""

    def run(self) -> list[nodes.Node]:
        rows = cards.load()
        built = rows[rows["result"] == cards.BUILT]
        body = "".join(_line(row) for row in built.to_dict("records"))
        heads = ("type", *SHOWN.values())
        caption = "What transformers returns, by type of model."
        failed = rows[rows["result"] != cards.BUILT]
        reasons = []
        for row in failed.to_dict("records"):
            name, reason = html.escape(row["type"]), html.escape(row["result"])
            reasons.append(f'<li id="{name}"><code>{name}</code>: {reason}</li>')
        table = (
            f"{_table('atlas-types', 'Types of models', caption, heads, body)}"
            f"<details><summary>{len(failed)} types of which no small model runs, and why"
            f"</summary><ul>{''.join(reasons)}</ul></details>"
        )
        return [nodes.raw("", table, format="html")]


class Changes(SphinxDirective):
    """What differs between the last two versions of transformers, fact by fact."""

    def run(self) -> list[nodes.Node]:
        before, after = cards.versions()[-2:]
        changed = cards.changes(before, after)
        is_known = (changed["fact"] != "result") | (changed[["before", "after"]] != "").all(axis=1)
        lines = []
        for words, types in (
            (f"new in {after}", changed.loc[changed["before"] == "", "type"]),
            (f"no longer in {after}", changed.loc[changed["after"] == "", "type"]),
        ):
            names = types[~is_known[types.index]]
            if len(names):
                links = ", ".join(f'<a href="#{name}">{name}</a>' for name in names)
                lines.append(f"<li>{len(names)} {words}: {links}</li>")
        parts = [f"<ul>{''.join(lines)}</ul>"]
        labels = {"result": "whether a small model runs"} | {
            fact.name: fact.label for fact in cards.FACTS
        }
        for fact, label in labels.items():
            cells = changed[is_known & (changed["fact"] == fact)]
            if len(cells):
                parts.append(_of_fact(label, cells, before, after))
        return [nodes.raw("", "".join(parts), format="html")]


def _of_fact(label: str, cells: pd.DataFrame, before: str, after: str) -> str:
    """The changes of a fact: a table, which is folded if it is long."""
    heads = ("type", f"transformers {before}", f"transformers {after}")
    lines = []
    for cell in cells.to_dict("records"):
        name = html.escape(cell["type"])
        said = "".join(f"<td>{html.escape(cell[side])}</td>" for side in ("before", "after"))
        lines.append(f'<tr><th scope="row"><a href="#{name}">{name}</a></th>{said}</tr>')
    words = html.escape(label)
    table = _table("atlas-changes", f"Changes: {words}", words, heads, "".join(lines))
    if len(cells) <= LONGEST:
        return table
    return f"<details><summary>{len(cells)} types: {words}</summary>{table}</details>"


def _table(kind: str, label: str, caption: str, heads: Iterable[str], body: str) -> str:
    """A table that can be scrolled, also by keyboard.

    Args:
        kind: its class.
        label: what a screen reader calls it.
        body: its rows, as HTML.
    """
    head = "".join(f'<th scope="col">{words}</th>' for words in heads)
    return (
        f'<div class="pst-scrollable-table-container {kind}" tabindex="0" role="region" '
        f'aria-label="{label}"><table class="table"><caption>{caption}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _line(row: Mapping[str, str]) -> str:
    name = html.escape(row["type"])
    cells = []
    for column in SHOWN:
        words = html.escape(row[column])
        fact = cards.BY_NAME.get(column)
        differs = fact is not None and fact.surprises(row[column])
        cells.append(f"<td{' class=differs' * differs}>{words}</td>")
    return f'<tr id="{name}"><th scope="row"><a href="#{name}">{name}</a></th>{"".join(cells)}</tr>'


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension with Sphinx."""
    app.add_directive("atlas", Field)
    app.add_directive("atlas-figure", Figure)
    app.add_directive("atlas-table", Types)
    app.add_directive("atlas-changes", Changes)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
