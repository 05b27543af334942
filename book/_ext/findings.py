"""What the pages found, at their tops and on the landing page.

A Sphinx extension (``_config.yml`` names it). The cell of a notebook with the tag ``found`` says in a few bullets what
was found. Its text is also shown under the title, with the first figure of the page or the one of the cell tagged
``lead``. The first bullet begins with the finding in one bold sentence. ``{finding}`` shows that bullet with a figure,
``{findings}`` those of all pages of a part.
"""

import re
from pathlib import Path
from typing import ClassVar

import nbformat
from docutils import nodes
from docutils.parsers.rst import directives
from nbformat import NotebookNode
from pages import Drawn, displayed, executed, figures, has_tag, keep, light
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.docutils import SphinxDirective

from analysis_lib.book.parameters import read_notebook

TAG = "found"
HEADLINE = re.compile(r"\*\*([^*]+?)\.?\*\*[.:]?\s*(.*)", re.DOTALL)
FOLDER = Path("_findings")
# In pixels: twice that of the style sheet.
HEIGHT = 576
HEAD = """\
:::::{{admonition}} What we found
:class: tip

{first}

{picture}

{rest}
:::::
"""
PICTURE = """\
::::{{div}} lead
[![{alt}](/{path})](#{name})

{{numref}}`{name}`
::::
"""
CARD = """\
:::{{card}} {title}
:class-card: finding

{text}

![{alt}](/{picture})

{{doc}}`{page}`, {{numref}}`{figure}`
:::
"""


def found(notebook: NotebookNode) -> str:
    """What the cell tagged ``found`` displays, or "" where there is none."""
    return "\n".join(displayed(cell) for cell in notebook.cells if has_tag(cell, TAG)).strip()


def first(text: str) -> str:
    """The first bullet of what was found."""
    return text.removeprefix("- ").partition("\n- ")[0]


def headline(text: str) -> tuple[str, str]:
    """The first bullet as its bold sentence, without the full stop, and the rest."""
    sentence = HEADLINE.match(first(text))
    return sentence.groups() if sentence else ("", first(text))


def small(environment: BuildEnvironment, name: str, drawn: Drawn) -> str:
    """Write a figure where pages can show it once more; its path from the top of the book."""
    picture = FOLDER / f"{name}.png"
    keep(environment, picture, light(drawn.files["png"], HEIGHT))
    return picture.as_posix()


class Finding(SphinxDirective):
    """``{finding} outliers/contributions``, with the name of a figure of that page."""

    required_arguments = 1
    option_spec: ClassVar = {"figure": directives.unchanged_required}

    def run(self) -> list[nodes.Node]:
        (page,), name = self.arguments, self.options["figure"]
        notebook = read_notebook(Path(self.env.srcdir, f"{page}.ipynb"))
        drawn, (title, text) = figures(notebook).get(name), headline(found(notebook))
        if drawn is None or "png" not in drawn.files or not title:
            raise self.error(f"{page} has no figure {name}, or no cell tagged {TAG} that begins with a bold sentence")
        card = {"title": title, "text": text, "alt": drawn.alt, "picture": small(self.env, name, drawn)}
        return self.parse_text_to_nodes(CARD.format(**card, figure=name, page=page))


class Findings(SphinxDirective):
    """``{findings} outliers``: the first thing that each page of a part found."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        pages = executed(self.env).items()
        part = {page: read_notebook(path) for page, path in pages if page.startswith(f"{self.arguments[0]}/")}
        lines = (f"- **{{doc}}`/{page}`**: {first(found(notebook))}" for page, notebook in part.items())
        return self.parse_text_to_nodes("\n".join(["**What its pages found**\n", *lines]))


def _hoist(app: Sphinx, name: str, source: list[str]) -> None:
    """Put what a page found under its title, with its first figure, in the source that Sphinx is about to parse."""
    if app.env.doc2path(name).endswith(".ipynb"):
        notebook = nbformat.reads(source[0], 4)
        if text := found(notebook):
            drawn = figures(notebook)
            for cell in notebook.cells:
                if (about := cell.metadata.get("mystnb", {})).get("figure", {}).get("name") in drawn:
                    about["image"]["alt"] = drawn[about["figure"]["name"]].alt
            pictures = sorted((name for name in drawn if "png" in drawn[name].files), key=lambda n: not drawn[n].leads)
            leads = [PICTURE.format(alt=drawn[n].alt, path=small(app.env, n, drawn[n]), name=n) for n in pictures[:1]]
            # On a phone the picture is on the first screen, too.
            main = first(text)
            rest = text.removeprefix("- ").removeprefix(main).strip()
            # Within the first cell: what comes after it is counted by others.
            notebook.cells[0].source += "\n\n" + HEAD.format(first=main, picture="".join(leads), rest=rest)
            source[0] = nbformat.writes(notebook)


def setup(app: Sphinx) -> dict[str, bool]:
    """What Sphinx calls when it loads the extension."""
    app.connect("source-read", _hoist)
    app.add_directive("finding", Finding)
    app.add_directive("findings", Findings)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
