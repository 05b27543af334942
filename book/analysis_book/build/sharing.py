"""Executed notebooks for pages that leave this machine, without paths to folders of its user."""

import json
import os
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path

import nbformat

from analysis_book.build.freshness import inputs, paper_data
from analysis_book.build.notebook import INJECTED, injected_cell
from analysis_book.build.parameters import Parameters
from analysis_book.figures.markup import plain
from analysis_lib.corpora.files import path_and_columns
from analysis_lib.files import data_directory
from analysis_lib.models.names import ModelName


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


def data_to_share(spec: str) -> str:
    """The specification of a corpus, with its path shortened by :func:`path_to_share`.

    >>> data_to_share("/home/someone/reviews.csv:text"), data_to_share("wikipedia")
    ('reviews.csv:text', 'wikipedia')
    """
    path, columns = path_and_columns(spec)
    return path_to_share(path) + columns


def data_name(spec: str) -> str:
    """The specification of a corpus without the folders of its file.

    >>> data_name("data/reviews.csv:a/b"), data_name("news:sentences")
    ('reviews.csv:a/b', 'news:sentences')
    """
    path, columns = path_and_columns(spec)
    return last_part(path) + columns


def names_to_share(names: Iterable[str]) -> list[str]:
    """Names of models for pages that leave this machine: folders without the path to them.

    If folders would get the same name, they keep as many parts of their path as needed.

    >>> names = ["minilm", "/home/someone/bert@dtype=bfloat16", "/data/a/gpt", "/data/b/gpt"]
    >>> names_to_share(names)
    ['minilm', 'bert@dtype=bfloat16', 'a/gpt', 'b/gpt']
    """
    names = list(names)
    shared = [_name_to_share(name, 1) for name in names]
    longest = max((name.count("/") for name in names), default=0)
    for parts in range(2, longest + 2):
        alike = [number for number, name in enumerate(shared) if shared.count(name) > 1]
        for number in alike:
            shared[number] = _name_to_share(names[number], parts)
    return shared


def _name_to_share(name: str, parts: int) -> str:
    """A name with at most ``parts`` parts per folder, unless it is below the current folder."""
    for folder in filter(None, ModelName.parse(name).folders):
        if path_to_share(folder) != folder:
            name = name.replace(folder, "/".join(Path(folder).parts[-parts:]).lstrip("/"), 1)
    return name


def path_to_share(path: str) -> str:
    """A path below the current folder as given; of any other path, the last part.

    >>> path_to_share("models/bert"), path_to_share("/home/someone/models/bert")
    ('models/bert', 'bert')
    """
    parts = Path(path).parts
    leads_elsewhere = os.path.isabs(path) or path.startswith("~") or ".." in parts
    return last_part(path) if leads_elsewhere else path


def last_part(path: str) -> str:
    """The last part of a path, or the path itself if it has none."""
    return Path(path).name or path
