"""The parameters of notebooks, and their values by a profile and by the command line."""

import ast
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import nbformat
import yaml
from sphinx_external_toc.parsing import parse_toc_yaml

from analysis_book.build.listing import ROOT
from analysis_lib import files
from analysis_lib.errors import AnalysisError, decimal_number, near_names, whole_number

PROFILES = ("smoke", "default", "paper", "local")
TYPES = {"int": int, "float": float, "str": str, "bool": bool, "list": list, "dict": dict}

Parameters = Mapping[str, object]


@dataclass(frozen=True)
class Parameter:
    """A parameter that a notebook declares; its type is one of ``TYPES``."""

    name: str
    type: str
    default: object


def read_notebook(path: Path) -> nbformat.NotebookNode:
    """The notebook at ``path``, which is refused if it cannot be read."""

    def read(path: Path) -> nbformat.NotebookNode:
        notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
        if notebook.nbformat < 4:
            raise ValueError(
                "its format is older than 4 (`jupyter nbconvert --to notebook` writes it anew)"
            )
        nbformat.validate(notebook)
        return notebook

    return files.read(path, read, "give a notebook as Jupyter saves it")


def parameters_cell(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode | None:
    """The cell that is tagged ``parameters``."""
    return next(
        (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])), None
    )


def is_input(name: str) -> bool:
    """True if a parameter of this name names the models, runs or data that a notebook reads."""
    return name in ("model", "run", "runs", "data") or name.endswith(("models", "_data"))


def notebook_names(root: Path = ROOT) -> list[str]:
    """The notebooks of the table of contents, in order: paths below ``book`` without suffix."""
    toc = root / "_toc.yml"
    if not toc.exists():
        raise AnalysisError(f"no book in {root}: run this in a clone of the repository")
    documents = (str(Path(name)) for name in parse_toc_yaml(toc))
    return [name for name in documents if (root / "book" / f"{name}.ipynb").exists()]


def notebook_parameters(notebook: Path) -> dict[str, Parameter]:
    """The parameters of a notebook's cell tagged ``parameters``, in order.

    Raises:
        AnalysisError: one of them is no literal of one of ``TYPES``.
    """
    cell = parameters_cell(read_notebook(notebook))
    if not cell:
        return {}
    declared = {}
    try:
        for node in ast.parse(cell.source).body:
            match node:
                case ast.AnnAssign(ast.Name(name), kind, ast.expr() as value):
                    type_name = ast.unparse(kind).partition("[")[0]
                    declared[name] = Parameter(name, type_name, ast.literal_eval(value))
                case ast.Assign([ast.Name(name)], value):
                    default = ast.literal_eval(value)
                    declared[name] = Parameter(name, type(default).__name__, default)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise AnalysisError(
            f"{notebook}: its parameters cell is not plain Python: {str(error).split(' (')[0]}"
        ) from None
    except ValueError:
        raise AnalysisError(
            f"{notebook}: the default of parameter {name} is not a literal"
        ) from None
    for name, parameter in declared.items():
        if parameter.type not in TYPES:
            raise AnalysisError(
                f"{notebook}: parameter {name} has type {parameter.type}; use {', '.join(TYPES)}"
            )
        _check_value(parameter.default, parameter)
    return declared


def book_parameters(root: Path = ROOT) -> dict[str, Parameter]:
    """The parameters of all notebooks of the book, for ``coerce``."""
    return {name: parameter for spec in _specs(root).values() for name, parameter in spec.items()}


def _specs(root: Path) -> dict[str, dict[str, Parameter]]:
    return {
        name: notebook_parameters(root / "book" / f"{name}.ipynb") for name in notebook_names(root)
    }


def coerce(values: Iterable[tuple[str, str]], spec: Mapping[str, Parameter]) -> dict[str, object]:
    """Strings of the command line as values of the types that ``spec`` gives.

    A list is written ``3,6`` or ``[3, 6]``, a mapping ``{units: document}``.

    Raises:
        AnalysisError: an unknown name, or a string that is not a value of the parameter's type.

    >>> coerce([("layers", "3,6")], {"layers": Parameter("layers", "list", [1])})
    {'layers': [3, 6]}
    """
    values = list(values)
    _refuse_unknown((name for name, _ in values), spec, "this notebook")
    return {name: _typed(text, spec[name]) for name, text in values}


def complete(
    parameters: Parameters, spec: Mapping[str, Parameter], where: str
) -> dict[str, object]:
    """The value of every parameter in ``spec``: that in ``parameters``, or its default.

    Raises:
        AnalysisError: ``parameters`` holds an unknown name, or a value of another type.
    """
    _refuse_unknown(parameters, spec, where)
    for name, value in parameters.items():
        _check_value(value, spec[name])
    return {name: spec[name].default for name in spec} | dict(parameters)


def resolve(
    profile: str, parameters: Parameters, root: Path = ROOT
) -> dict[str, dict[str, object]]:
    """The values of all parameters of each notebook.

    ``parameters`` come before the profile, and the profile before the defaults of the notebook.

    Raises:
        AnalysisError: an unknown profile, notebook or parameter, or a value of another type.
    """
    specs = _specs(root)
    every = {parameter for spec in specs.values() for parameter in spec}
    settings = _profile(root, profile)
    shared = settings.pop("all", None) or {}
    _refuse_unknown(parameters, every, "the book")
    _refuse_unknown(shared, every, f"profile {profile}: the book")
    for name in settings.keys() - specs.keys():
        raise AnalysisError(
            f"profile {profile} names the unknown notebook {name}: {near_names(name, specs)}"
        )
    resolved = {}
    for name, spec in specs.items():
        of_all = {key: value for key, value in shared.items() if key in spec}
        own = settings.get(name) or {}
        overriding = {key: value for key, value in parameters.items() if key in spec}
        given = of_all | own | overriding
        resolved[name] = complete(given, spec, f"profile {profile}: {name}")
    return resolved


def _refuse_unknown(names: Iterable[str], known: Iterable[str], where: str) -> None:
    """Raise, with the nearest known names, if one of ``names`` is not known."""
    known = list(known)
    for name in names:
        if name not in known:
            hint = near_names(name, known) if known else "it has no parameters"
            raise AnalysisError(f"{where} has no parameter {name}: {hint}")


def _profile(root: Path, profile: str) -> dict:
    if profile not in PROFILES:
        raise AnalysisError(f"no profile {profile}: {near_names(profile, PROFILES)}")
    path = root / "book" / "parameters" / f"{profile}.yml"
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, yaml.YAMLError) as error:
        raise AnalysisError(f"cannot read the profile {path}: {error}") from error
    if base := settings.pop("extends", None):
        extended = _profile(root, base)
        for name, values in settings.items():
            extended[name] = extended.get(name, {}) | values
        return extended
    return settings


def _typed(text: str, parameter: Parameter) -> object:
    """The items of a list have the type of the default's items."""
    try:
        if parameter.type == "dict":
            return _mapping(text)
        is_blank_name = parameter.type == "str" and parameter.default and not text.strip()
        if is_blank_name:
            raise ValueError
        if parameter.type != "list":
            return _scalar(text, TYPES[parameter.type])
        flow = text if text.startswith("[") else f"[{text}]"
        items = yaml.load(flow, yaml.BaseLoader)
        if not all(isinstance(item, str) for item in items):
            raise ValueError
        kinds = {type(item) for item in parameter.default}
        # Of a list that is empty by default, plain numbers are numbers, and all else is text: `no`
        # is a name.
        kind = str
        if len(kinds) == 1:
            kind = kinds.pop()
        elif not kinds and all(re.fullmatch(r"-?(0|[1-9][0-9]*)", item) for item in items):
            kind = int
        return [_scalar(item, kind) for item in items]
    except (KeyError, ValueError, yaml.YAMLError):
        raise AnalysisError(_misfit(text, parameter)) from None


def _mapping(text: str) -> dict:
    mapping = yaml.safe_load(text)
    if not isinstance(mapping, dict):
        raise ValueError
    return mapping


def _scalar(text: str, kind: type) -> object:
    if kind is bool:
        return {"true": True, "false": False}[text.lower()]
    return {int: whole_number, float: decimal_number}.get(kind, kind)(text)


def _check_value(value: object, parameter: Parameter) -> None:
    allowed = {"float": (float, int)}.get(parameter.type, (TYPES[parameter.type],))
    if type(value) not in allowed:
        raise AnalysisError(_misfit(value, parameter))


def _misfit(value: object, parameter: Parameter) -> str:
    return (
        f"parameter {parameter.name} takes a value of type {parameter.type}, "
        f"such as {parameter.default!r}, and got {value!r}"
    )
