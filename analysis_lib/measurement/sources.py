"""Which sources a result depends on, as one hash: ``source_hash({"analysis_lib.metrics.anisotropy"})``.

A result depends on the modules that it starts from and on all that these import, directly or not. What counts of a
module is its code: an edit of a docstring, a comment or the layout changes no hash.
"""

import ast
import hashlib
import os
from collections.abc import Iterable
from functools import cache
from importlib.util import resolve_name
from pathlib import Path
from typing import NamedTuple

from analysis_lib.errors import AnalysisError

LIBRARY = Path(__file__).parents[1]
NAME = LIBRARY.name

# The dotted name of a module, and perhaps of what it holds, in its parts.
Parts = tuple[str, ...]
# The files of the library and when they were last written, as of what is kept of them.
_state: list[tuple[str, int]] = []


def source_hash(modules: Iterable[str]) -> str:
    """The sha256 of the code of modules of the library, and of every module of it that they import.

    Imports are read from the sources, those inside functions too. ``from analysis_lib import measure`` leads to the
    module that defines ``measure``, and not to everything that the package imports.

    Args:
        modules: dotted names, such as ``analysis_lib.metrics.anisotropy``. Those of other packages are left out: what
            is installed is known by its version.

    Raises:
        AnalysisError: the library has no such module, or it is no valid Python.
    """
    _refresh()
    modules = {module for module in modules if module.split(".")[0] == NAME}
    for module in modules:
        if _path(module) is None:
            raise AnalysisError(f"the library has no module {module}: give dotted names, such as {__name__}")
    code = {module: _source(module).digest for module in _reached(modules)}
    return hashlib.sha256("\n".join(f"{module} {code[module]}" for module in sorted(code)).encode()).hexdigest()


def imported_modules(code: str) -> set[str]:
    """The modules of the library that provide what a piece of code, such as that of a notebook, imports and uses.

    Lines of IPython, which begin with ``%`` or ``!``, are left out.

    Raises:
        AnalysisError: the code is no valid Python.

    >>> sorted(imported_modules("from analysis_lib import load_model, metrics; metrics.Anisotropy()"))
    ['analysis_lib.metrics.anisotropy', 'analysis_lib.models.loading']
    """
    _refresh()
    plain = "\n".join("" if line.lstrip().startswith(("%", "!")) else line for line in code.splitlines())
    return {module for parts in _imports(_nodes(_parsed(plain, "the code")), "")[1] for module in _provider(parts)}


def _refresh() -> None:
    """Forget the library as it was read, if a file of it has changed since."""
    # Of a walk of pathlib, this takes a third of the time: a measurement asks for a dozen hashes.
    files = (f"{folder}/{name}" for folder, _, names in os.walk(LIBRARY) for name in names if name.endswith(".py"))
    state = [(path, os.stat(path).st_mtime_ns) for path in files]
    if state != _state:
        _state[:] = state
        for known in (_path, _source, _provider):
            known.cache_clear()


def _reached(modules: set[str]) -> set[str]:
    reached, waiting = set(), set(modules)
    while waiting:
        reached |= waiting
        found = {module for name in waiting for parts in _source(name).uses for module in _provider(parts)}
        # The packages around a module may do more than define names once they are imported, such as registering them.
        around = {".".join(parts[:n]) for parts in (name.split(".") for name in waiting) for n in range(1, len(parts))}
        waiting = (found | {package for package in around if _source(package).acts}) - reached
    return reached


@cache
def _provider(parts: Parts) -> set[str]:
    """The module that defines what a dotted name stands for; a package's own imports are followed."""
    module = parts[0]
    for i, name in enumerate(parts[1:], 1):
        if _path(f"{module}.{name}") is not None:
            module = f"{module}.{name}"
        elif _path(module).name != "__init__.py":
            break
        elif name in (source := _source(module)).bound:
            return _provider((*source.bound[name], *parts[i + 1 :]))
        elif name in source.defined:
            break
        else:
            # Made when it is asked for, we do not know how: it may come from any module of the package.
            return {module, *_below(module)}
    return {module}


@cache
def _path(module: str) -> Path | None:
    """The file of a module of the library."""
    path = LIBRARY.joinpath(*module.split(".")[1:])
    file = path / "__init__.py" if path.is_dir() else path.with_name(f"{path.name}.py")
    return file if file.is_file() else None


def _below(package: str) -> set[str]:
    """All modules of a package."""
    home = _path(package).parent
    files = [path.relative_to(home).with_suffix("") for path in home.rglob("*.py") if path.name != "__init__.py"]
    return {".".join((package, *file.parts)) for file in files}


class _Source(NamedTuple):
    """A module as it is written: a digest of its code, what it uses, and the names that others can import from it."""

    digest: str
    uses: set[Parts]
    bound: dict[str, Parts]  # by local name, the dotted name that an import gives it
    defined: set[str]
    acts: bool  # whether it does more than define names when it is imported


@cache
def _source(module: str) -> _Source:
    path = _path(module)
    tree = _parsed(path.read_text(encoding="utf-8"), str(path))
    nodes = _nodes(tree)
    bound, uses = _imports(nodes, module if path.name == "__init__.py" else module.rpartition(".")[0])
    plain = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.FunctionDef, ast.ClassDef)
    body = tree.body[ast.get_docstring(tree) is not None :]
    acts = any(not isinstance(node, plain) and not _is_late(node) for node in body)
    names = {getattr(node, "name", None) for node in tree.body}
    names |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return _Source(_digest(nodes), uses, bound, names, acts)


def _is_late(node: ast.stmt) -> bool:
    """Whether these are the imports of a package that come when they are needed, see :mod:`analysis_lib.lazy`."""
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def _parsed(code: str, origin: str) -> ast.Module:
    try:
        return ast.parse(code)
    except SyntaxError as error:
        raise AnalysisError(f"{origin} is no valid Python: {error.msg}, line {error.lineno}") from error


def code_hash(path: Path) -> str:
    """The sha256 of the code of one file, without docstrings, comments and layout."""
    return _digest(_nodes(_parsed(path.read_text(encoding="utf-8"), str(path))))


def _nodes(tree: ast.Module) -> list[ast.AST]:
    """All nodes of a tree, as of ``ast.walk``, which takes twice as long: every kernel walks the library."""
    found = [tree]
    for node in found:
        for value in map(node.__dict__.get, node._fields):
            found += [value] if isinstance(value, ast.AST) else []
            found += [item for item in value if isinstance(item, ast.AST)] if isinstance(value, list) else []
    return found


def _dotted(node: ast.expr) -> Parts:
    """The parts of a dotted name; none where the name starts from a call or an item, which is a node by itself."""
    if isinstance(node, ast.Attribute):
        return (*base, node.attr) if (base := _dotted(node.value)) else ()
    return (node.id,) if isinstance(node, ast.Name) else ()


def _digest(nodes: list[ast.AST]) -> str:
    """The sha256 of a tree, the first of its nodes, from which its docstrings are taken."""
    for node in nodes:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            match node.body:
                case [ast.Expr(ast.Constant(str())), *rest]:
                    node.body = rest
    return hashlib.sha256(ast.dump(nodes[0]).encode()).hexdigest()


def _imports(nodes: list[ast.AST], package: str) -> tuple[dict[str, Parts], set[Parts]]:
    """What a module or a piece of code takes from the library: ``bound`` and ``uses`` of :class:`_Source`.

    ``metrics.Anisotropy`` is used where ``metrics`` is imported; a name that is imported and never mentioned is used
    whole, for what its import does.
    """
    bound, uses = {}, set()
    inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    whole = (node for node in nodes if isinstance(node, ast.Name | ast.Attribute) and id(node) not in inner)
    mentioned = {*map(_dotted, whole)} - {()}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                parts = tuple(alias.name.split("."))
                if parts[0] == NAME:
                    bound[alias.asname or NAME] = parts if alias.asname else parts[:1]
                    if not alias.asname and len(parts) > 1:
                        mentioned.add(parts)
        elif isinstance(node, ast.ImportFrom):
            parts = tuple(resolve_name("." * node.level + (node.module or ""), package).split("."))
            if parts[0] == NAME:
                bound |= {alias.asname or alias.name: (*parts, alias.name) for alias in node.names if alias.name != "*"}
                uses |= {parts for alias in node.names if alias.name == "*"}
    mentioned |= {(name,) for name in bound.keys() - {name for name, *_ in mentioned}}
    return bound, uses | {(*bound[name], *attributes) for name, *attributes in mentioned if name in bound}
