"""The executed notebooks of the staged book, and the numbered figures in them, for the extensions beside this file."""

import base64
import html
import io
import re
from dataclasses import dataclass
from pathlib import Path

from nbformat import NotebookNode
from PIL import Image
from sphinx.environment import BuildEnvironment

from analysis_lib.figures.slider import COLOURS

# The endings of the files of a figure, by the kind of an output.
KINDS = {"image/png": "png", "image/svg+xml": "svg", "text/csv": "csv"}
# Of a slider, as analysis_lib.figures draws it.
SLIDER = re.compile(r'<figure id="(?P<name>[^"]+)" class="slider">(?P<inner>.*)</figure>', re.DOTALL)
CAPTION = re.compile(r"<figcaption[^>]*>(?P<caption>.*?)</figcaption>", re.DOTALL)
FRAME = re.compile(r'<img src="data:image/png;base64,(?P<picture>[^"]+)" alt="(?P<alt>[^"]+)"')
# Of a cell that says, computed, what is seen on the figure before it; of the figure that stands at the top of its page.
SEEN, LEAD = "seen", "lead"
ROLE, MARKS = re.compile(r"\{\w+\}`(?:[^`<]*<)?([^`>]*)>?`"), re.compile(r"[*`$\\]")


@dataclass
class Drawn:
    """A numbered figure: what it says, what is seen on it, by the ending of a file its content, and if it leads."""

    caption: str
    alt: str
    files: dict[str, bytes]
    leads: bool = False


def on_white(picture: bytes, width: int, height: int) -> Image.Image:
    """A picture without transparency, no wider and no higher than so many pixels."""
    image = Image.open(io.BytesIO(picture)).convert("RGBA")
    image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    image.thumbnail((width, height))
    return image


def light(picture: bytes, height: int = 10_000) -> bytes:
    """A PNG on white, no higher than so many pixels, with a palette: figures have few colours, and files get small."""
    image, buffer = on_white(picture, height, height), io.BytesIO()
    image.quantize(COLOURS, dither=Image.Dither.NONE).save(buffer, format="png", optimize=True)
    return buffer.getvalue()


def keep(environment: BuildEnvironment, file: Path, content: bytes) -> str:
    """Write a file that the site takes along; its address from the page that Sphinx is reading."""
    path = Path(environment.srcdir, file)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return "../" * environment.docname.count("/") + file.as_posix()


def executed(environment: BuildEnvironment) -> dict[str, Path]:
    """The notebooks by the names of their pages, in the order of the table of contents."""
    paths = {name: Path(environment.srcdir, f"{name}.ipynb") for name in environment.config.external_site_map}
    return {name: path for name, path in paths.items() if path.is_file()}


def has_tag(cell: NotebookNode, tag: str) -> bool:
    """Whether a cell has a tag."""
    return tag in cell.metadata.get("tags", ())


def displayed(cell: NotebookNode) -> str:
    """The text that a cell of code has displayed, as Markdown."""
    outputs = cell.get("outputs", ())
    return "\n".join(output.get("data", {}).get("text/markdown", "") for output in outputs).strip()


def plain(text: str) -> str:
    """Markdown without its marks, for who has it read aloud."""
    return " ".join(MARKS.sub("", ROLE.sub(r"\1", text)).split())


def figures(notebook: NotebookNode) -> dict[str, Drawn]:
    """The numbered figures of an executed notebook by their names; of a slider, the frame that it begins with.

    After what a figure shows its alt text has what is seen on it, computed with the page: what the next cell tagged
    ``seen`` says, before another figure.
    """
    found, unseen = {}, None
    for cell in notebook.cells:
        shown = {kind: text for output in cell.get("outputs", ()) for kind, text in output.get("data", {}).items()}
        about = cell.metadata.get("mystnb", {})
        files = {ending: shown[kind].encode() for kind, ending in KINDS.items() if kind in shown}
        if "png" in files:
            files["png"] = base64.b64decode(files["png"])
        if slider := SLIDER.search(shown.get("text/html", "")):
            *_, last = FRAME.finditer(slider["inner"])
            words = [html.unescape(text) for text in (CAPTION.search(slider["inner"])["caption"], last["alt"])]
            found[slider["name"]] = Drawn(*words, files | {"png": base64.b64decode(last["picture"])})
        elif name := about.get("figure", {}).get("name"):
            words = (about["figure"]["caption"], about["image"]["alt"])
            found[name] = unseen = Drawn(*words, files, has_tag(cell, LEAD))
        elif unseen and has_tag(cell, SEEN):
            unseen.alt, unseen = f"{unseen.alt} {plain(displayed(cell))}", None
    return found
