"""Executed notebooks as pages: the finding, figures with their files, how the page was made.

A Sphinx extension (``_config.yml`` names it). The cell tagged ``found`` computes what was found;
its text stands under the title, and below it, with caption and number, the figure of the cell
tagged ``lead``, or the first one, which stands nowhere else. Each figure has a rendering for dark
pages. The parameters are shown as they ran. Sliders and views become figures with numbers. What is
downloaded has no outputs.
"""

import base64
import functools
import gzip
import html
import itertools
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import nbformat
import vl_convert
from docutils import nodes
from nbformat import NotebookNode
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.transforms import SphinxTransform

from analysis_book.build.parameters import parameters_cell, read_notebook
from analysis_book.figures import view
from analysis_book.figures.markup import code, code_block, plain
from analysis_book.figures.style import themed
from analysis_book.figures.view import SCRIPT, vega

# The endings of the files of a figure, by the kind of an output.
KINDS = {"image/png": "png", "image/svg+xml": "svg", "text/csv": "csv"}
# From so many bytes on, a table is compressed: pandas reads it as it is.
LARGE_TABLE = 400_000
# Of what moves, a slider or a view, as analysis_book.figures draws it.
MOVING = re.compile(
    r'<figure id="(?P<name>[^"]+)" class="(?P<kind>slider|view)">(?P<inner>.*)</figure>', re.DOTALL
)
TABLE = re.compile(r'<script class="table" type="application/json" data-key="(\w+)">.*?</script>')
CAPTION = re.compile(r"<figcaption[^>]*>(?P<caption>.*?)</figcaption>", re.DOTALL)
# The model of a view that runs in the page, as JSON.
MODEL = re.compile(r'"runs": ("[^"]+")')
VIEWS = Path(view.__file__).parent
FRAME = re.compile(
    r'<img src="data:image/svg[^,]*;base64,(?P<picture>[^"]+)" alt="(?P<alt>[^"]+)"[^>]*>'
)
FIGURES = Path("_static", "figures")
FOUND = """\
:::::{{admonition}} Finding
:class: tip finding

{text}
:::::
"""
# Coordinates in an SVG, and what of a number is more than a hundredth of a point.
COORDINATES = re.compile(rb'\s(?:d|x|y|points)="[^"]*"')
DIGITS = re.compile(rb"(\.\d\d)\d+")
# The theme leaves pictures of the class ``dark-light`` as they are.
SHOWN = '<img class="figure dark-light {theme}" loading="lazy" src="{address}" alt="{alt}">'
LEAD = """
```{{figure}} /{file}
:name: {name}
:alt: {alt}
:figclass: leading

{caption}
```
"""
# Of what moves, the HTML, in which no line is one of backticks.
MOVED = """
```{{raw}} html
{figure}
```
"""
ABOVE = "{{numref}}`{name}` is at the top of the page."
MADE = """\
::::{{dropdown}} How this page was made

{command}

Executed in {seconds:.0f} seconds, finished {finished}, with the key `{key}`; {{ref}}`status` says what that is, and
has the versions.

{inputs}

::::
"""  # noqa: E501


@dataclass
class Drawn:
    """A numbered figure.

    Attributes:
        caption: the sentence below it.
        alt: a description for readers who cannot see it.
        leads: true if it leads its page.
        files: their contents, by the endings of their names.
    """

    caption: str
    alt: str
    leads: bool = False
    files: dict[str, bytes] = field(default_factory=dict)


def keep(environment: BuildEnvironment, file: Path, content: bytes) -> str:
    """Write a file that the site takes along; its address from the page that Sphinx is reading."""
    path = Path(environment.srcdir, file)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return "../" * environment.docname.count("/") + file.as_posix()


def executed(environment: BuildEnvironment) -> dict[str, Path]:
    """The notebooks by the names of their pages, in the order of the table of contents."""
    paths = {
        name: Path(environment.srcdir, f"{name}.ipynb")
        for name in environment.config.external_site_map
    }
    return {name: path for name, path in paths.items() if path.is_file()}


def tagged(notebook: NotebookNode, tag: str) -> list[NotebookNode]:
    """The cells with a tag."""
    return [cell for cell in notebook.cells if tag in cell.metadata.get("tags", ())]


def finding(notebook: NotebookNode) -> str:
    """The text that the cell tagged ``found`` displays, or "" where there is none."""
    outputs = [output for cell in tagged(notebook, "found") for output in cell.outputs]
    return "\n".join(output.get("data", {}).get("text/markdown", "") for output in outputs).strip()


def figures(notebook: NotebookNode) -> dict[str, Drawn]:
    """The numbered figures of an executed notebook by their names.

    Of a slider, it is the frame that it begins with.
    """
    numbered = {}
    leading = tagged(notebook, "lead")
    for cell in notebook.cells:
        data = {}
        for output in cell.get("outputs", ()):
            data |= output.get("data", {})
        files = {ending: data[kind].encode() for kind, ending in KINDS.items() if kind in data}
        if "png" in files:
            files["png"] = base64.b64decode(files["png"])
        if "svg" in files:
            files["svg"] = _as_file(files["svg"])
        if "csv" in files:
            table = files.pop("csv")
            ending = table_ending(table)
            files[ending] = gzip.compress(table, mtime=0) if ending == "csv.gz" else table
        about = cell.metadata.get("mystnb", {})
        if moving := MOVING.search(data.get("text/html", "")):
            *_, last = FRAME.finditer(moving["inner"])
            # A caption in HTML is no markdown, which those of other figures are.
            caption = plain(html.unescape(CAPTION.search(moving["inner"])["caption"]))
            alt = html.unescape(last["alt"])
            if "png" not in files:
                files["png"] = _png(base64.b64decode(last["picture"]).decode())
            numbered[moving["name"]] = Drawn(caption, alt, cell in leading, files)
        elif (name := about.get("figure", {}).get("name")) and files:
            caption = about["figure"]["caption"]
            numbered[name] = Drawn(caption, about["image"]["alt"], cell in leading, files)
    return numbered


def table_ending(csv: bytes) -> str:
    """The ending of the name of a table's file: ``csv``, or ``csv.gz`` for a large one."""
    return "csv" if len(csv) < LARGE_TABLE else "csv.gz"


def _as_file(svg: bytes) -> bytes:
    """A picture as a file of the site: short, and with a rendering for dark pages."""
    return themed(COORDINATES.sub(_shortened, svg).decode()).encode()


def _shortened(coordinates: re.Match) -> bytes:
    """Coordinates of an SVG to a hundredth of a point, which halves the file."""
    return DIGITS.sub(rb"\1", coordinates[0])


@functools.cache
def _png(svg: str) -> bytes:
    return vl_convert.svg_to_png(svg, scale=2)


def shown(environment: BuildEnvironment, name: str, figure: Drawn, alt: str) -> str:
    """The HTML of a figure: the picture for light pages, and where there is one that for dark ones.

    Both are in one file.
    """
    if "svg" not in figure.files:
        address = keep(environment, FIGURES / f"{name}.png", figure.files["png"])
        return SHOWN.format(theme="", address=address, alt=html.escape(alt))
    return _in_both_themes(keep(environment, FIGURES / f"{name}.svg", figure.files["svg"]), alt)


def _in_both_themes(address: str, alt: str) -> str:
    pictures = []
    for theme, part in (("on-light", ""), ("on-dark", "#dark")):
        pictures.append(SHOWN.format(theme=theme, address=address + part, alt=html.escape(alt)))
    return "".join(pictures)


def lead(notebook: NotebookNode) -> NotebookNode | None:
    """The cell whose figure stands for a page; a page of tables has none."""
    drawing = []
    for cell in notebook.cells:
        if figures(nbformat.v4.new_notebook(cells=[cell])):
            drawing.append(cell)
    leading = [cell for cell in drawing if cell in tagged(notebook, "lead")]
    return next(iter(leading + drawing), None)


def _move_to_the_top(environment: BuildEnvironment, cell: NotebookNode) -> str:
    """Take the figure of a cell from its place; its Markdown at the top of the page."""
    ((name, figure),) = figures(nbformat.v4.new_notebook(cells=[cell])).items()
    markdown = ""
    kept = []
    for output in cell.outputs:
        data = output.get("data", {})
        if MOVING.search(data.get("text/html", "")):
            markdown = MOVED.format(figure=data["text/html"])
        elif not KINDS.keys() & data.keys():
            kept.append(output)
    if not markdown:
        ending = "svg" if "svg" in figure.files else "png"
        file = FIGURES / f"{name}.{ending}"
        keep(environment, file, figure.files[ending])
        alt = " ".join(figure.alt.split())
        markdown = LEAD.format(file=file.as_posix(), name=name, alt=alt, caption=figure.caption)
        del cell.metadata["mystnb"]
    where = {"text/markdown": ABOVE.format(name=name)}
    cell.outputs = [*kept, nbformat.v4.new_output("display_data", where)]
    return markdown


def _as_page(app: Sphinx, name: str, source: list[str]) -> None:
    """Make a page of an executed notebook, in the source that Sphinx is about to parse."""
    if not app.env.doc2path(name).endswith(".ipynb"):
        return
    notebook = nbformat.reads(source[0], 4)
    if text := finding(notebook):
        top = FOUND.format(text=text)
        if cell := lead(notebook):
            top += _move_to_the_top(app.env, cell)
        # Within the first cell: what comes after it is counted by others.
        notebook.cells[0].source += f"\n\n{top}"
        for cell in tagged(notebook, "found"):
            cell.outputs = []
    show_parameters(notebook)
    notebook.cells.append(nbformat.v4.new_markdown_cell(_how(name, notebook)))
    for cell in notebook.cells:
        if cell.cell_type == "code":
            # Warnings, which the page does not show, would leave an empty box.
            cell.outputs = [one for one in cell.outputs if one.get("name") != "stderr"]
        for output in cell.get("outputs", ()):
            _keep_shown(output.get("data", {}))
    source[0] = nbformat.writes(notebook)


def _keep_shown(data: dict) -> None:
    """Take from an output what its page does not show: all but a figure's SVG, or the HTML of what
    moves.
    """
    unseen = {"text/csv"}
    if "image/svg+xml" in data:
        moves = MOVING.search(data.get("text/html", ""))
        unseen |= {"image/png", "image/svg+xml" if moves else "text/html"}
    for kind in unseen & data.keys():
        del data[kind]


def show_parameters(notebook: NotebookNode) -> None:
    """Write the values that ran into the cell of the parameters; the injected cell goes."""
    injected = tagged(notebook, "injected-parameters")
    notebook.cells = [cell for cell in notebook.cells if cell not in injected]
    cell = parameters_cell(notebook)
    for key, value in notebook.metadata["analysis_lib"]["parameters"].items():
        line = re.compile(rf"^({key}(?:: \w+)? = )(?:\[[^\]]*\]|\"[^\"]*\"|[^\s#]+)", re.MULTILINE)
        literal = repr(value)
        if isinstance(value, str | list):
            literal = json.dumps(value, ensure_ascii=False)
        cell.source = line.sub(lambda old, new=literal: old[1] + new, cell.source, count=1)


def _how(name: str, notebook: NotebookNode) -> str:
    """The part of a page on how it was made."""
    record = notebook.metadata["analysis_lib"]
    given = [shlex.join(("-p", key, str(value))) for key, value in record["parameters"].items()]
    command = " \\\n    ".join([f"python -m analysis_lib run {name}", *given])
    inputs = [f"- {plain(what)}: {code(content)}" for what, content in record["inputs"].items()]
    return MADE.format(
        command=code_block(command, "bash"),
        seconds=record["seconds"],
        finished=record["finished"][:16].replace("T", " ") + " UTC",
        key=record["key"][:12],
        inputs="\n".join(inputs),
    )


def _add_files(app: Sphinx, page: nodes.document) -> None:
    """Show each figure from its file, and below its caption all files: PNG, SVG and CSV."""
    path = Path(app.env.doc2path(app.env.docname))
    if path.suffix != ".ipynb":
        return
    numbered = figures(read_notebook(path))
    for node in page.findall(nodes.figure):
        for name in {*node["names"]} & numbered.keys():
            links = []
            for ending, content in numbered[name].files.items():
                address = keep(app.env, FIGURES / f"{name}.{ending}", content)
                links.append(f'<a href="{address}" download>{ending.upper()}</a>')
            files = f'<p class="files">{" · ".join(links)}</p>'
            node += nodes.legend("", nodes.raw("", files, format="html"))
            for image in list(node.findall(nodes.image)):
                picture = shown(app.env, name, numbered[name], image["alt"])
                image.replace_self(nodes.raw("", picture, format="html"))


class Moving(SphinxTransform):
    """Put what moves, which a notebook shows as HTML, into a figure of the page.

    Labels are collected after that. Its scripts are those of the site, and a table that several
    views share stands on the page once.
    """

    default_priority = 800

    def apply(self) -> None:
        tables: set[str] = set()
        for node in list(self.document.findall(nodes.raw)):
            moving = MOVING.search(node.astext())
            if not moving:
                continue
            name = moving["name"]
            caption = html.unescape(CAPTION.search(moving["inner"])["caption"])
            inner = CAPTION.sub("", moving["inner"])
            inner = TABLE.sub(partial(_once, tables), inner)
            filed = self._frame if moving["kind"] == "slider" else self._still
            inner = FRAME.sub(partial(filed, name, itertools.count()), inner)
            figure = nodes.figure("", ids=[name], names=[name], classes=[moving["kind"]])
            figure += nodes.raw("", inner, format="html")
            figure += nodes.caption("", caption)
            self.document.note_explicit_target(figure)
            node.replace_self(figure)

    def _filed(self, name: str, numbers: Iterator[int], frame: re.Match) -> str:
        """The address of the file of a frame, which a browser asks for when it is to be shown."""
        file = Path("_static", "frames", f"{name}-{next(numbers)}.svg")
        return keep(self.env, file, _as_file(base64.b64decode(frame["picture"])))

    def _frame(self, name: str, numbers: Iterator[int], frame: re.Match) -> str:
        """A frame of a slider."""
        return _in_both_themes(self._filed(name, numbers, frame), html.unescape(frame["alt"]))

    def _still(self, name: str, numbers: Iterator[int], frame: re.Match) -> str:
        """The picture of a view, which is for paper, too."""
        address = self._filed(name, numbers, frame)
        return f'<img loading="eager" src="{address}" alt="{frame["alt"]}">'


def _once(known: set[str], table: re.Match) -> str:
    """A table of a view, or "" if it stands on the page already."""
    if table[1] in known:
        return ""
    known.add(table[1])
    return table[0]


def _add_scripts(
    app: Sphinx, name: str, template: str, context: dict, page: nodes.document | None
) -> None:
    """Add Vega and the script of views, two files of the site, to the pages that have a view.

    A view with a model brings scripts that run it, and its weights, which they load on demand.
    """
    body = context.get("body", "")
    if 'class="table" type="application/json"' not in body:
        return
    folder = app.outdir / "_static"
    folder.mkdir(exist_ok=True)
    scripts = {"vega.min.js": vega(), "views.js": SCRIPT}
    if model := MODEL.search(body):
        # Torch takes seconds, which all other pages need not wait for.
        from analysis_book.figures.one_sentence import SCRIPTS
        from analysis_book.figures.weights import weights_script
        from analysis_lib import load_model

        loaded = load_model(json.loads(model[1]))
        (folder / "bert-weights.js").write_bytes(weights_script(loaded))
        running = {file: (VIEWS / file).read_text(encoding="utf-8") for file in SCRIPTS}
        # Views look for what computes their numbers.
        scripts = running | scripts
    for file, text in scripts.items():
        (folder / file).write_text(text, encoding="utf-8")
        app.add_js_file(file, loading_method="defer")


def _write_downloads(app: Sphinx, error: Exception | None) -> None:
    """Take the outputs from the notebooks for download, and write each as a script, too.

    The script saves it; ``book/_static/download.js`` says why.
    """
    for path in (app.outdir / "_sources").rglob("*.ipynb"):
        notebook = nbformat.read(path, 4)
        show_parameters(notebook)
        del notebook.metadata["analysis_lib"]
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.outputs = []
                cell.execution_count = None
        nbformat.write(notebook, path)
        arguments = map(json.dumps, (path.name, path.read_text(encoding="utf-8")))
        path.with_name(f"{path.name}.js").write_text(
            f"saveNotebook({', '.join(arguments)});\n", encoding="utf-8"
        )


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension with Sphinx."""
    app.connect("source-read", _as_page)
    # Before Sphinx collects pictures, to copy them once more.
    app.connect("doctree-read", _add_files, priority=400)
    app.connect("html-page-context", _add_scripts)
    app.connect("build-finished", _write_downloads)
    app.add_transform(Moving)
    return {"parallel_read_safe": True, "parallel_write_safe": False}
