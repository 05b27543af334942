"""Keys of notebooks: one changes when anything does that the outputs of its notebook depend on."""

import functools
import importlib.metadata
from pathlib import Path

from nbformat import NotebookNode

from analysis_book.build.parameters import ROOT, Parameters, read_notebook
from analysis_book.sources import NAME, PACKAGE, imported_sources, source_hash
from analysis_book.training.runs import run_identity
from analysis_lib import corpora
from analysis_lib.files import data_directory, hashes_of
from analysis_lib.models.folders import weights_identity
from analysis_lib.store import key, library_hash

# What the modules of ``papers`` read beside their own sources.
PAPERS = PACKAGE / "papers"
PAPER_DATA = ("reference", "claims", "measurements")
# What every kernel loads.
OF_KERNELS = f"from {NAME}.build import recording"


def notebook_key(notebook: Path, parameters: Parameters, root: Path = ROOT) -> str:
    """A hash of all that the outputs of ``notebook`` with ``parameters`` depend on.

    These are its cells, its parameters, the library, the sources of the book that it imports, the
    models and data that its parameters name, the published tables, claims and stored measurements
    if it imports ``analysis_book.papers``, and the installed versions.

    Raises:
        AnalysisError: a model or a corpus among the parameters is unknown or cannot be reached.
    """
    content = read_notebook(notebook)
    return key(
        # All of a cell but its outputs: words and captions are in the executed copy, too.
        [[cell.cell_type, cell.source, cell.metadata] for cell in content.cells],
        parameters,
        library_hash(),
        source_hash(imported_sources([*_code(content), OF_KERNELS])),
        inputs(parameters),
        paper_data(content, root / "data"),
        installed(),
    )


def paper_data(notebook: NotebookNode, data: Path) -> dict[str, str]:
    """Hashes of what the modules on the papers read in ``data``, if a notebook uses one of them.

    Only notebooks import ``analysis_book.papers``: everything else lies below it.
    """
    if not any(path.is_relative_to(PAPERS) for path in imported_sources(_code(notebook))):
        return {}
    return {f"data/{name}": key(hashes_of(data / name)) for name in PAPER_DATA}


def _code(notebook: NotebookNode) -> list[str]:
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


@functools.cache
def installed() -> dict[str, str]:
    """The version of every installed package, by name."""
    described = (distribution.metadata for distribution in importlib.metadata.distributions())
    return {metadata["Name"]: metadata["Version"] for metadata in described}


def inputs(parameters: Parameters, shown: Parameters | None = None) -> dict[str, str]:
    """The content of the models, runs and data that the parameters name.

    These are ``model``, ``..._models``, ``run``, ``runs``, ``data`` and ``..._data``. Measurements
    that ship are those of ``beside`` and ``shipped...``.

    Args:
        parameters: what is read.
        shown: the same parameters, with other names for what they name.
    """
    contents = {}
    measurements = data_directory() / "measurements"
    for name, value in parameters.items():
        values = value if isinstance(value, list) else [value]
        called = value if shown is None else shown[name]
        called = called if isinstance(called, list) else [called]
        pairs = [*zip(called, values, strict=True)]
        if name == "beside" or name.startswith("shipped"):
            for shipped in values:
                content = key(hashes_of(measurements / shipped))
                contents[f"shipped measurement {shipped}"] = content
        elif name == "model" or name.endswith("models"):
            for title, model in pairs:
                contents[f"model {title}"] = weights_identity(model)
        if name in ("run", "runs"):
            for title, run in pairs:
                contents[f"run {title}"] = run_identity(run)
        if name == "data" or name.endswith("_data"):
            # Before any kernel starts: every notebook would stop at the same mistake.
            corpora.check_draw(parameters.get("limit"), parameters.get("seed"))
            for title, spec in pairs:
                if spec:
                    contents[f"{name} {title}"] = corpora.data_identity(spec)
    return contents
