"""Executed notebooks for pages that leave this machine, without paths to folders of its user."""

import json
from collections.abc import Iterable, Mapping
from html import escape

import nbformat

from analysis_book.build.freshness import inputs, paper_data
from analysis_book.build.notebook import INJECTED, injected_cell
from analysis_book.build.parameters import Parameters
from analysis_book.figures.markup import plain
from analysis_lib.corpora.sharing import data_to_share, path_to_share
from analysis_lib.files import data_directory
from analysis_lib.models.names import names_to_share


def parameters_to_share(parameters: Parameters) -> dict[str, object]:
    """Parameters whose models, runs and data are named without the way to them."""
    shared = {}
    for name, value in parameters.items():
        values = value if isinstance(value, list) else [value]
        if name in ("run", "runs"):
            values = [path_to_share(run) for run in values]
        elif name in ("model", "beside") or name.endswith("models"):
            values = names_to_share(values)
        elif name == "data" or name.endswith("_data"):
            values = [data_to_share(spec) for spec in values]
        elif name == "options" and "tokenizer" in value:
            values = [value | {"tokenizer": path_to_share(value["tokenizer"])}]
        shared[name] = values if isinstance(value, list) else values[0]
    return shared


def to_share(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """An executed notebook as its page shows it, with the content of what it has read, by name.

    Its parameters are those of :func:`parameters_to_share`, and what its cells have shown is
    without these paths, too.
    """
    record = notebook.metadata["analysis_lib"]
    given = record["parameters"]
    shared = parameters_to_share(given)
    record["parameters"] = shared
    changed = record.pop("changed", shared)
    record["inputs"] = inputs(given, shared) | paper_data(notebook, data_directory())
    if shared == given:
        return notebook
    ways = _ways(given, shared)
    for cell in notebook.cells:
        if INJECTED in cell.metadata.get("tags", ()):
            cell.source = injected_cell({name: shared[name] for name in changed}).source
        elif cell.cell_type == "code":
            cell.outputs = [nbformat.from_dict(_without(output, ways)) for output in cell.outputs]
    return notebook


def _ways(given: Mapping[str, object], shared: Mapping[str, object]) -> list[str]:
    """The beginnings of values that are not shared: as text, as markdown, as HTML and as JSON."""
    ways = set()
    for name, value in given.items():
        for whole, part in zip(_parts(value), _parts(shared[name]), strict=True):
            way = whole.removesuffix(part) if isinstance(whole, str) else ""
            # Of a file in the root, there is no way but a slash.
            if len(way) > 1:
                ways |= {way, plain(way), escape(way), json.dumps(way)[1:-1]}
    # The longest first, and those of one length in one order in every process.
    return sorted(ways, key=lambda way: (len(way), way), reverse=True)


def _parts(value: object) -> list:
    """The values of a parameter of several, or itself."""
    if isinstance(value, Mapping):
        return [*value.values()]
    return value if isinstance(value, list) else [value]


def _without(content: object, ways: Iterable[str]) -> object:
    """JSON without some texts, wherever they stand in it."""
    if isinstance(content, str):
        for way in ways:
            content = content.replace(way, "")
        return content
    if isinstance(content, Mapping):
        return {name: _without(value, ways) for name, value in content.items()}
    if isinstance(content, list):
        return [_without(value, ways) for value in content]
    return content
