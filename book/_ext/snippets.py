"""Texts for the search page, which shows where a word stands in a page.

A Sphinx extension (``_config.yml`` names it). Sphinx's search page fetches each page that it has found, which a browser
refuses where the site is opened from the file system; ``book/_static/snippets.js`` answers with these texts instead.
"""

import html
import json

from docutils import nodes
from sphinx.application import Sphinx

FILE = "texts.js"
PROSE = (nodes.paragraph, nodes.caption)


def sections(node: nodes.Element) -> str:
    """The prose of a page as HTML: its sections, without code, tables and pictures."""
    parts = []
    for child in node.children:
        if isinstance(child, nodes.section):
            parts.append(f'<section id="{child["ids"][0]}">{sections(child)}</section>')
        elif isinstance(child, PROSE):
            parts.append(html.escape(child.astext()) + " ")
        elif isinstance(child, nodes.Element) and not isinstance(child, nodes.table):
            parts.append(sections(child))
    return "".join(parts)


def _collect(app: Sphinx, name: str, template: str, context: dict, page: nodes.document | None) -> None:
    if page is not None:
        app.env.texts_of_pages[name] = f'<div role="main">{sections(page)}</div>'
    elif name == "search":
        texts = json.dumps(app.env.texts_of_pages, ensure_ascii=False)
        (app.outdir / "_static").mkdir(exist_ok=True)
        (app.outdir / "_static" / FILE).write_text(f"const pageTexts = {texts};\n", encoding="utf-8")
        app.add_js_file(FILE)
        app.add_js_file("snippets.js")


def _begin(app: Sphinx) -> None:
    app.env.texts_of_pages = {}


def setup(app: Sphinx) -> dict[str, bool]:
    """What Sphinx calls when it loads the extension."""
    app.connect("builder-inited", _begin)
    app.connect("html-page-context", _collect)
    return {"parallel_read_safe": True, "parallel_write_safe": False}
