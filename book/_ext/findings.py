"""What the pages found, at their tops and on the landing page.

A Sphinx extension (``_config.yml`` names it). The cell of a notebook with the tag ``found`` says in a few bullets what
was found. Its text is also shown under the title, and ``{finding}`` shows the first bullet with a figure of the page.
"""

import base64
from pathlib import Path
from typing import ClassVar

import nbformat
from docutils import nodes
from docutils.parsers.rst import directives
from nbformat import NotebookNode
from pages import numbered
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from analysis_lib.book.parameters import read_notebook

TAG = "found"
FOLDER = "_findings"
HEAD = "::::{admonition} What we found\n:class: tip\n"
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
    cells = [cell for cell in notebook.cells if TAG in cell.metadata.get("tags", ())]
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    return "\n".join(output.get("data", {}).get("text/markdown", "") for output in outputs).strip()


def figure(notebook: NotebookNode, name: str) -> tuple[bytes, str] | None:
    """A figure as PNG and its alternative text, or None where no cell draws a figure of this name."""
    if cell := numbered(notebook).get(name):
        for output in cell.get("outputs", ()):
            if picture := output.get("data", {}).get("image/png"):
                return base64.b64decode(picture), cell.metadata["mystnb"]["image"]["alt"]
    return None


class Finding(SphinxDirective):
    """``{finding} outliers/contributions``, with a title and the name of a figure of that page."""

    required_arguments = 1
    option_spec: ClassVar = {"title": directives.unchanged_required, "figure": directives.unchanged_required}

    def run(self) -> list[nodes.Node]:
        (page,), name = self.arguments, self.options["figure"]
        notebook = read_notebook(Path(self.env.srcdir, f"{page}.ipynb"))
        drawn, text = figure(notebook, name), found(notebook)
        if drawn is None or not text:
            raise self.error(f"{page} has no figure {name}, or no cell tagged {TAG} with an output")
        picture = Path(self.env.srcdir, FOLDER, f"{name}.png")
        picture.parent.mkdir(exist_ok=True)
        picture.write_bytes(drawn[0])
        first, *_ = text.removeprefix("- ").split("\n- ")
        card = {"text": first, "alt": drawn[1], "picture": f"{FOLDER}/{picture.name}", "figure": name, "page": page}
        return self.parse_text_to_nodes(CARD.format(title=self.options["title"], **card))


def _hoist(app: Sphinx, name: str, source: list[str]) -> None:
    """Put what a page found under its title, in the source that Sphinx is about to parse."""
    if app.env.doc2path(name).endswith(".ipynb"):
        notebook = nbformat.reads(source[0], 4)
        if text := found(notebook):
            # Within the first cell: what comes after it is counted by others.
            notebook.cells[0].source += f"\n\n{HEAD}\n{text}\n::::\n"
            source[0] = nbformat.writes(notebook)


def setup(app: Sphinx) -> dict[str, bool]:
    """What Sphinx calls when it loads the extension."""
    app.connect("source-read", _hoist)
    app.add_directive("finding", Finding)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
