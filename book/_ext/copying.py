"""The second copy button of a code cell: a script of it and what it needs of the cells above.

A Sphinx extension adds the button to the pages of notebooks (``_config.yml`` names it);
``book/_static/copying.js`` answers a click.
"""

import html
import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import gast
from beniget import DefUseChains
from docutils import nodes
from nbformat import NotebookNode
from notebooks import show_parameters
from sphinx.application import Sphinx

from analysis_book.build.parameters import read_notebook

IMPORT = gast.Import | gast.ImportFrom
# Methods of pandas that read names of the cell in a string.
QUERIES = ("query", "eval")
LABEL = "Copy with everything it needs"
BUTTON = f"""<button class="copy-everything o-tooltip--left" type="button" aria-label="{LABEL}"
 data-tooltip="{LABEL}" data-script="%s"><svg viewBox="0 0 24 24" aria-hidden="true"><path
 d="M4 8l8-4 8 4-8 4zM4 12l8 4 8-4M4 16l8 4 8-4"/></svg></button>"""


@dataclass(eq=False)
class Statement:
    """A statement of a cell, or an import of one name."""

    source: str
    number: int  # of the cell of the notebook
    trees: Sequence[gast.AST]
    imported: bool = False
    sets_up: bool = False  # a call in a cell of imports


def scripts(cells: Sequence[str]) -> list[str]:
    """Each of a notebook's code cells as a script that runs by itself; "" if it is not Python.

    A script holds the statements above that give a value to the names that its cell reads, those
    that change these values, and so on; imports come first. A value is changed by an assignment to
    an attribute or an item of it, also of an item in a loop over it, and by a method called as a
    statement. What a cell of imports calls is kept. What a function does to an argument is not
    noticed.

    >>> print(scripts(["import math, sys", "r = 2\\ns = 3", "print(math.pi * r**2)"])[2])
    import math
    <BLANKLINE>
    r = 2
    <BLANKLINE>
    print(math.pi * r**2)
    """
    units = []
    whole = []
    for number, source in enumerate(cells):
        units += statements(number, source)
        whole.append(_script(units, number))
    return whole


def _script(units: Sequence[Statement], number: int) -> str:
    """The script of a cell, from the statements up to its end."""
    if not any(unit.number == number for unit in units):
        return ""
    needs = _needs(units)
    reached = set()
    queue = {unit for unit in units if unit.sets_up or unit.number == number}
    while queue:
        reached |= queue
        queue = set().union(*(needs[unit] for unit in queue)) - reached
    needed = [unit for unit in units if unit in reached]
    parts = []
    imports = [unit.source for unit in needed if unit.imported]
    if imports:
        parts.append(_merged(imports))
    others = [unit for unit in needed if not unit.imported]
    for (sets_up, _), group in itertools.groupby(others, lambda unit: (unit.sets_up, unit.number)):
        text = "\n".join(unit.source for unit in group).strip("\n")
        if sets_up and parts:
            # It stands with the imports.
            parts[0] += f"\n{text}"
        else:
            parts.append(text)
    return "\n\n".join(parts)


def _merged(imports: Sequence[str]) -> str:
    """Imports of one name each, those from one module in a line."""
    lines: dict[str, list[str]] = {}
    for line in imports:
        if line.startswith("from "):
            start, word, name = line.rpartition(" import ")
            lines.setdefault(start + word, []).append(name)
        else:
            lines.setdefault(line, [])
    return "\n".join(start + ", ".join(dict.fromkeys(names)) for start, names in lines.items())


def statements(number: int, source: str) -> Iterator[Statement]:
    """The statements of a cell, with the lines between them; imports of one name each."""
    try:
        tree = gast.parse(source)
    except SyntaxError:  # Lines of IPython, or another language.
        return
    _read_queries(tree)
    lines = source.splitlines()
    end = 0
    opening = _opening(tree)
    for _, group in itertools.groupby(tree.body, lambda node: node.lineno):
        *_, node = trees = [*group]
        part = "\n".join(lines[end : node.end_lineno])
        end = node.end_lineno
        if isinstance(node, IMPORT) and len(trees) == 1:
            fields = {name: getattr(node, name) for name in node._fields}
            for alias in node.names:
                single = type(node)(**{**fields, "names": [alias]})
                yield Statement(gast.unparse(single).strip(), number, [single], imported=True)
        else:
            yield Statement(part, number, trees, sets_up=node in opening)


def _read_queries(cell: gast.Module) -> None:
    """Let calls such as ``rows.query("layer == @layer")`` read the names in their strings."""
    for node in gast.walk(cell):
        if not isinstance(node, gast.Call) or getattr(node.func, "attr", "") not in QUERIES:
            continue
        for part in [*node.args]:
            if isinstance(part, gast.Constant) and isinstance(part.value, str):
                for name in re.findall(r"@(\w+)", part.value):
                    node.args.append(gast.Name(name, gast.Load(), None, None))


def _opening(cell: gast.Module) -> list[gast.stmt]:
    """The imports and calls that begin a cell, and set the notebook up; none without an import."""
    opening = []
    for node in cell.body:
        if not isinstance(node, IMPORT | gast.Expr):
            break
        opening.append(node)
    return opening if any(isinstance(node, IMPORT) for node in opening) else []


class _Chains(DefUseChains):
    """The statements where each value is given and read.

    Names without a value are those of the builtins, or of later cells.
    """

    def unbound_identifier(self, name: str, node: gast.AST) -> None: ...


def _needs(units: Sequence[Statement]) -> dict[Statement, set[Statement]]:
    """By statement, those that give a value which it reads, or change it before that."""
    module = gast.Module([tree for unit in units for tree in unit.trees], [])
    chains = _Chains()
    chains.visit(module)
    # Of each node, the index of its statement.
    index = {}
    for i, unit in enumerate(units):
        for tree in unit.trees:
            index |= dict.fromkeys(gast.walk(tree), i)
    changed = _changed(module)
    needs = defaultdict(set)
    for value in chains.chains.values():
        # No builtins.
        if value.node not in index:
            continue
        giver = units[index[value.node]]
        readers = [user.node for user in value.users() if user.node in index]
        changing = set()
        if not giver.imported:
            changing = {index[node] for node in readers if node in changed}
        for node in readers:
            reader = index[node]
            before = {units[i] for i in changing if i < reader}
            needs[units[reader]] |= {giver} | before
    return needs


def _changed(tree: gast.AST) -> set[gast.Name]:
    """The names whose value a statement changes, where they stand."""
    changed: set[gast.Name] = set()
    # From the inside out: what changes an item in an inner loop changes what the outer loop runs
    # over.
    for node in reversed(list(gast.walk(tree))):
        if isinstance(node, gast.Attribute | gast.Subscript):
            if not isinstance(node.ctx, gast.Load):
                changed |= _base(node)
        elif isinstance(node, gast.Expr) and isinstance(node.value, gast.Call):
            function = node.value.func
            if isinstance(function, gast.Attribute):
                changed |= _base(function)
        elif isinstance(node, gast.For):
            items = {name.id for name in gast.walk(node.target) if isinstance(name, gast.Name)}
            if items & {name.id for name in changed}:
                changed |= {name for name in gast.walk(node.iter) if isinstance(name, gast.Name)}
    return changed


def _base(node: gast.AST) -> set[gast.Name]:
    """The name at the bottom of attributes, items and calls: ``axes`` in ``axes.flat[0].set``."""
    while not isinstance(node, gast.Name):
        node = getattr(node, "value", None) or getattr(node, "func", None)
        if node is None:
            return set()
    return {node}


def scripts_of(notebook: NotebookNode) -> list[str]:
    """The scripts of an executed notebook's code cells, with the parameters that ran.

    They have their comments from the cell that declares them.
    """
    show_parameters(notebook)
    return scripts([cell.source for cell in notebook.cells if cell.cell_type == "code"])


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension with Sphinx."""
    app.connect("doctree-read", _add_buttons)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _add_buttons(app: Sphinx, page: nodes.document) -> None:
    sources = [
        node
        for node in page.findall(nodes.container)
        if node.get("nb_element") == "cell_code_source"
    ]
    if not sources:
        return
    notebook = read_notebook(Path(app.env.doc2path(app.env.docname)))
    whole = scripts_of(notebook)
    for node, script in zip(sources, whole, strict=True):
        if script:
            node += nodes.raw("", BUTTON % html.escape(script), format="html")
