"""What a reader can take along: the files of every figure, and how a page was made.

A Sphinx extension (``_config.yml`` names it). Below the caption of a figure stand its picture as PNG and SVG and the
numbers it is drawn from as CSV; at the end of a page, the command that makes it again and the notebook without outputs.
"""

import base64
import json
import shlex
from pathlib import Path

import nbformat
from docutils import nodes
from nbformat import NotebookNode
from pages import figures, keep, light
from sphinx.application import Sphinx

from analysis_lib.book.freshness import inputs, paper_data, used_modules
from analysis_lib.book.parameters import read_notebook
from analysis_lib.corpora.packages import data_directory

FIGURES, NOTEBOOKS = Path("_static", "figures"), Path("_static", "notebooks")
MADE = """\
::::{{dropdown}} How this page was made

```bash
{command}
```

Executed in {seconds:.0f} seconds, finished {finished}, with the key `{key}`; {{ref}}`status` says what that is, and
has the versions.

{inputs}

```{{raw}} html
<p>Notebook: <a href="{up}_sources/{page}.ipynb" download>as executed</a>,
<a href="{clean}" download>without outputs</a></p>
```
::::
"""


def clean(notebook: NotebookNode) -> NotebookNode:
    """The notebook without outputs and without what its execution added."""
    copy = nbformat.from_dict(notebook)
    copy.cells = [cell for cell in copy.cells if "injected-parameters" not in cell.metadata.get("tags", ())]
    for cell in copy.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    copy.metadata.pop("analysis_lib", None)
    return copy


def _add_files(app: Sphinx, page: nodes.document) -> None:
    path = Path(app.env.doc2path(app.env.docname))
    if path.suffix != ".ipynb":
        return
    found = figures(read_notebook(path))
    for node in page.findall(nodes.figure):
        for name in node["names"]:
            links = []
            for ending, content in found[name].files.items() if name in found else ():
                address = keep(app.env, FIGURES / f"{name}.{ending}", content)
                links.append(f'<a href="{address}" download>{ending.upper()}</a>')
            if links:
                node += nodes.legend("", nodes.raw("", f'<p class="files">{" · ".join(links)}</p>', format="html"))


def _say_how(app: Sphinx, name: str, source: list[str]) -> None:
    """Put how a page was made at its end, and leave its figures as PNG, in the source that Sphinx is about to parse."""
    if app.env.doc2path(name).endswith(".ipynb"):
        notebook = nbformat.reads(source[0], 4)
        record, bare = notebook.metadata["analysis_lib"], nbformat.writes(clean(notebook)) + "\n"
        address = keep(app.env, NOTEBOOKS / f"{name}.ipynb", bare.encode())
        read = inputs(record["parameters"]) | paper_data(used_modules(notebook), data_directory())
        given = [shlex.join(("-p", key, str(value))) for key, value in record["parameters"].items()]
        made = {
            "command": " \\\n    ".join([f"python -m analysis_lib run book/{name}.ipynb", *given]),
            "seconds": record["seconds"],
            "finished": record["finished"][:16].replace("T", " ") + " UTC",
            "key": record["key"][:12],
            "inputs": "\n".join(f"- {what}: `{content}`" for what, content in read.items()),
        }
        where = {"up": "../" * name.count("/"), "page": name, "clean": address}
        notebook.cells.append(nbformat.v4.new_markdown_cell(MADE.format(**made, **where)))
        # The page shows the PNG alone, and light; of a slider, its HTML.
        for data in (output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", ())):
            data.pop("text/csv", None)
            if data.keys() & {"image/png", "text/html"}:
                data.pop("image/svg+xml", None)
            if "image/png" in data:
                data["image/png"] = base64.b64encode(light(base64.b64decode(data["image/png"]))).decode()
        source[0] = nbformat.writes(notebook)


def _write_scripts(app: Sphinx, error: Exception | None) -> None:
    """Write each notebook once more, as a script that saves it: see ``book/_static/download.js``."""
    for notebook in (app.outdir / "_sources").rglob("*.ipynb"):
        arguments = map(json.dumps, (notebook.name, notebook.read_text(encoding="utf-8")))
        script = f"saveNotebook({', '.join(arguments)});\n"
        notebook.with_name(f"{notebook.name}.js").write_text(script, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    """What Sphinx calls when it loads the extension."""
    app.connect("source-read", _say_how)
    app.connect("doctree-read", _add_files)
    app.connect("build-finished", _write_scripts)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
