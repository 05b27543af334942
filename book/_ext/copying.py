"""The second copy button of a code cell: the cell with what it needs of the cells above it, as a
script.

A Sphinx extension adds the button to the pages of notebooks (``_config.yml`` names it);
``book/_static/copying.js`` answers a click.
"""

import html
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import gast
from beniget import DefUseChains
from docutils import nodes
from sphinx.application import Sphinx

from analysis_book.build.parameters import read_notebook

IMPORT = gast.Import | gast.ImportFrom
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
    sets_up: bool = False  # whether it is a call in a cell of imports


def scripts(cells: Sequence[str]) -> list[str]:
    """Each of a notebook's code cells as a script that runs by itself, or "" for a cell that is not
    Python.

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
    units = [unit for number, source in enumerate(cells) for unit in statements(number, source)]
    return [
        _script([unit for unit in units if unit.number <= number], number)
        for number in range(len(cells))
    ]


def _script(units: Sequence[Statement], number: int) -> str:
    if not any(unit.number == number for unit in units):
        return ""
    needed, queue, needs = (
        set(),
        {unit for unit in units if unit.sets_up or unit.number == number},
        _needs(units),
    )
    while queue:
        needed |= queue
        queue = set().union(*(needs[unit] for unit in queue)) - needed
    needed = [unit for unit in units if unit in needed]
    parts = [_merged(first)] if (first := [unit.source for unit in needed if unit.imported]) else []
    # What is set up stands with the imports.
    rest = itertools.groupby(
        (unit for unit in needed if not unit.imported), lambda unit: (unit.sets_up, unit.number)
    )
    for (sets_up, _), group in rest:
        text = "\n".join(unit.source for unit in group).strip("\n")
        parts = [f"{parts[0]}\n{text}", *parts[1:]] if sets_up and parts else [*parts, text]
    return "\n\n".join(parts)


def _merged(imports: Sequence[str]) -> str:
    """Imports of one name each, those from one module in a line."""
    lines: dict[str, list[str]] = {}
    for line in imports:
        start, word, name = (
            line.rpartition(" import ") if line.startswith("from ") else (line, "", "")
        )
        lines.setdefault(start + word, []).extend([name] if name else [])
    return "\n".join(start + ", ".join(dict.fromkeys(names)) for start, names in lines.items())


def statements(number: int, source: str) -> Iterator[Statement]:
    """The statements of a cell, with the lines between them; imports of one name each."""
    try:
        lines, tree, end = source.splitlines(), gast.parse(source), 0
    except SyntaxError:  # Lines of IPython, or another language.
        return
    # What a cell calls right after its imports sets the notebook up.
    opening = list(
        itertools.takewhile(lambda node: isinstance(node, IMPORT | gast.Expr), tree.body)
    )
    opening = opening if any(isinstance(node, IMPORT) for node in opening) else []
    for _, group in itertools.groupby(tree.body, lambda node: node.lineno):
        *_, node = trees = [*group]
        part = "\n".join(lines[end : node.end_lineno])
        end = node.end_lineno
        if isinstance(node, IMPORT) and len(trees) == 1:
            for alias in node.names:
                one = type(node)(
                    **{**{name: getattr(node, name) for name in node._fields}, "names": [alias]}
                )
                yield Statement(gast.unparse(one).strip(), number, [one], imported=True)
        else:
            yield Statement(part, number, trees, sets_up=node in opening)


class _Chains(DefUseChains):
    """Where each value is given and read; names without a value are those of the builtins, or of
    later cells.
    """

    def unbound_identifier(self, name: str, node: gast.AST) -> None: ...


def _needs(units: Sequence[Statement]) -> dict[Statement, set[Statement]]:
    """By statement, those that give a value which it reads, and those before it that change this
    value.
    """
    module, chains = gast.Module([tree for unit in units for tree in unit.trees], []), _Chains()
    chains.visit(module)
    places = {
        node: i for i, unit in enumerate(units) for tree in unit.trees for node in gast.walk(tree)
    }
    changed, needs = _changed(module), defaultdict(set)
    for value in (
        value for value in chains.chains.values() if value.node in places
    ):  # No builtins.
        giver = places[value.node]
        readers = [user.node for user in value.users() if user.node in places]
        changing = {
            places[node] for node in readers if node in changed and not units[giver].imported
        }
        for place in map(places.get, readers):
            needs[units[place]] |= {units[giver]} | {units[one] for one in changing if one < place}
    return needs


def _changed(tree: gast.AST) -> set[gast.Name]:
    """The names whose value a statement changes, where they stand."""
    found: set = set()
    # From the inside out: what changes an item in an inner loop changes what the outer loop runs
    # over.
    for node in reversed(list(gast.walk(tree))):
        if isinstance(node, gast.Attribute | gast.Subscript) and not isinstance(
            node.ctx, gast.Load
        ):
            found |= _base(node)
        elif isinstance(node, gast.Expr) and isinstance(node.value, gast.Call):
            found |= (
                _base(node.value.func) if isinstance(node.value.func, gast.Attribute) else set()
            )
        elif isinstance(node, gast.For):
            items = {name.id for name in gast.walk(node.target) if isinstance(name, gast.Name)}
            if items & {name.id for name in found}:
                found |= {name for name in gast.walk(node.iter) if isinstance(name, gast.Name)}
    return found


def _base(node: gast.AST) -> set[gast.Name]:
    """The name at the bottom of attributes, items and calls: ``axes`` in ``axes.flat[0].set``."""
    while not isinstance(node, gast.Name):
        node = getattr(node, "value", None) or getattr(node, "func", None)
        if node is None:
            return set()
    return {node}


def setup(app: Sphinx) -> dict[str, bool]:
    """What Sphinx calls when it loads the extension."""
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
    cells = read_notebook(Path(app.env.doc2path(app.env.docname))).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    shown = [cell for cell in code if "injected-parameters" not in cell.metadata.get("tags", ())]
    whole = dict(zip(map(id, code), scripts([cell.source for cell in code]), strict=True))
    for node, cell in zip(sources, shown, strict=True):
        if script := whole[id(cell)]:
            node += nodes.raw("", BUTTON % html.escape(script), format="html")
