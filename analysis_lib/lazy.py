"""Packages whose names are imported on first use, since the import of torch takes seconds."""

import ast
import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path


def lazily(
    package: str, more: Mapping[str, str] | None = None
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """The ``__getattr__`` and ``__dir__`` of a package with imports under ``if TYPE_CHECKING``.

    No name can be that of a module of the package, which would replace it once it is imported.

    Args:
        more: names that are not imported there, and the module of each.

    >>> __getattr__, __dir__ = lazily(__name__)  # doctest: +SKIP
    """
    known = homes(package) | dict(more or {})

    def named(name: str) -> object:
        if name not in known:
            raise AttributeError(
                f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package]
            )
        if known[name] == package:
            return importlib.import_module(f"{package}.{name}")
        # Kept in the package, so that it is looked up only once.
        value = _value(known[name], name)
        vars(sys.modules[package])[name] = value
        return value

    return named, lambda: sorted({*vars(sys.modules[package]), *known})


def _value(module: str, name: str) -> object:
    """A name of a package or module: one of its modules, or any other attribute."""
    home = importlib.import_module(module)
    if hasattr(home, name):
        return getattr(home, name)
    return importlib.import_module(f"{module}.{name}")


def homes(package: str) -> dict[str, str]:
    """Modules of the names that a package imports on first use, by name."""
    tree = ast.parse(Path(sys.modules[package].__file__).read_text(encoding="utf-8"))
    (late,) = (node.body for node in tree.body if isinstance(node, ast.If))
    return {alias.name: node.module for node in late for alias in node.names}
