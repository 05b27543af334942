"""The sources of the book that decide an outcome: what is kept on this machine is known by them.

The library is known by a hash of its own.
"""

import ast
import functools
import hashlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from analysis_lib.lazy import homes
from analysis_lib.store import SUFFIXES

PACKAGE = Path(__file__).resolve().parent
NAME = PACKAGE.name


@functools.cache
def book_hash() -> str:
    """The SHA-256 of every source of the book, as it is when a process first asks for it."""
    return source_hash(PACKAGE.rglob("*"))


def source_hash(paths: Iterable[Path]) -> str:
    """The SHA-256 of those of some files that are sources, with their places in the package."""
    whole = hashlib.sha256()
    for path in sorted(path for path in paths if path.suffix in SUFFIXES):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        whole.update(f"{path.relative_to(PACKAGE).as_posix()} {content}\n".encode())
    return whole.hexdigest()


def imported_sources(cells: Iterable[str]) -> set[Path]:
    """The files of the book that cells import, and those that these import.

    Of a package that is imported, they are all its files.
    """
    sources: set[Path] = set()
    waiting = list(cells)
    while waiting:
        code = waiting.pop()
        # Lines of IPython are no Python.
        with suppress(SyntaxError):
            new = {path for name in _imported_names(code) for path in _files(name)} - sources
            sources |= new
            waiting += [path.read_text(encoding="utf-8") for path in new if path.suffix == ".py"]
    return sources


@functools.cache
def _imported_names(code: str) -> list[str]:
    """The modules and packages that code imports, also inside its functions.

    From packages other than the book, any imported names are among them.
    """
    names = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            of_book = homes(NAME) if node.module == NAME else {}
            for alias in node.names:
                home = of_book.get(alias.name, node.module)
                name = f"{home}.{alias.name}"
                if not _files(name):
                    name = home
                names.append(name)
    return names


def _files(name: str) -> list[Path]:
    """The file of a module of the book, or those of a package, but not of the packages in it."""
    outer, *inner = name.split(".")
    if outer != NAME:
        return []
    path = PACKAGE.joinpath(*inner)
    if path.is_dir():
        return [file for file in path.iterdir() if file.suffix in SUFFIXES]
    module = path.with_suffix(".py")
    return [module] if module.is_file() else []
