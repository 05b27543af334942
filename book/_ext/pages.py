"""The executed notebooks of the staged book, and the numbered figures in them, for the extensions beside this file."""

from pathlib import Path

from nbformat import NotebookNode
from sphinx.environment import BuildEnvironment


def executed(environment: BuildEnvironment) -> dict[str, Path]:
    """The notebooks by the names of their pages, in the order of the table of contents."""
    paths = {name: Path(environment.srcdir, f"{name}.ipynb") for name in environment.config.external_site_map}
    return {name: path for name, path in paths.items() if path.is_file()}


def numbered(notebook: NotebookNode) -> dict[str, NotebookNode]:
    """The cells that draw a numbered figure, by its name."""
    named = ((cell.metadata.get("mystnb", {}).get("figure", {}).get("name"), cell) for cell in notebook.cells)
    return {name: cell for name, cell in named if name}
