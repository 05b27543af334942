"""The second copy button of a code cell: the cell with the cells above it that it depends on, as a script.

A Sphinx extension adds the button to the pages of notebooks (``_config.yml`` names it); ``book/_static/copying.js``
answers a click.
"""

import ast
import contextlib
import dis
import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import CodeType

from docutils import nodes
from sphinx.application import Sphinx

from analysis_lib.book.parameters import read_notebook

MAGIC = re.compile(r"^\s*[%!].*\n?", re.MULTILINE)
COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
CONDITIONAL = ast.If | ast.While | ast.Try | ast.Match
LABEL = "Copy with everything it needs"
BUTTON = f"""<button class="copy-everything o-tooltip--left" type="button" aria-label="{LABEL}"
 data-tooltip="{LABEL}" data-cells="%s"><svg viewBox="0 0 24 24" aria-hidden="true"><path
 d="M4 8l8-4 8 4-8 4zM4 12l8 4 8-4M4 16l8 4 8-4"/></svg></button>"""


def scripts(cells: Sequence[str]) -> list[str]:
    """Each of a notebook's code cells as a script that runs by itself, or "" for a cell that is not Python.

    A script holds the cells above that give a value to the names that its cell reads, the cells that change these
    values, and so on; imports come first. A value is changed by an assignment to an attribute or an item of it, also
    of an item in a loop over it, and by a method called as a statement. Lines of magic are left out. A function that
    changes an argument is not noticed.

    >>> print(scripts(["import math", "r = 2", "s = 3", "print(math.pi * r**2)"])[3])
    import math
    <BLANKLINE>
    r = 2
    <BLANKLINE>
    print(math.pi * r**2)
    """
    known, needed = orders(cells)
    return ["\n\n".join(known[i].source for i in order) if known[order[-1]].source else "" for order in needed]


def orders(cells: Sequence[str]) -> tuple[list["Cell"], list[list[int]]]:
    """The cells, and for each the indices of those that its script consists of, in their order there."""
    known = [analyse(source) for source in cells]
    imported = {alias for cell in known for alias in cell.imports}
    for cell in known:
        cell.changes |= cell.called - imported
    needs = [_needs(known, index) for index in range(len(known))]
    first = [cell.only_imports and not need for cell, need in zip(known, needs, strict=True)]
    return known, [sorted({*need, index}, key=lambda i: (not first[i], i)) for index, need in enumerate(needs)]


@dataclass
class Cell:
    """What the code of a cell does to the names of its notebook."""

    source: str = ""  # without magic
    reads: set[str] = field(default_factory=set)  # names whose earlier value it needs
    deferred: set[str] = field(default_factory=set)  # names that its functions read whenever they are called
    binds: set[str] = field(default_factory=set)  # names that have a value from here on
    changes: set[str] = field(default_factory=set)  # names whose value it changes, or may replace
    called: set[str] = field(default_factory=set)  # names with a method called as a statement: rows.append(1)
    imports: set[str] = field(default_factory=set)  # names that it imports
    only_imports: bool = False  # whether it imports and does nothing else but call


def _needs(cells: Sequence[Cell], index: int) -> set[int]:
    """The cells above that the cell depends on."""
    found: set[int] = set()
    seen: set[tuple[str, int]] = set()
    queue = [(name, index) for name in cells[index].reads]
    while queue:
        name, before = wanted = queue.pop()
        if wanted in seen:
            continue
        seen.add(wanted)
        for i in reversed(range(before)):
            if name in cells[i].binds | cells[i].changes:
                found.add(i)
                queue += [(read, i) for read in cells[i].reads] + [(read, before) for read in cells[i].deferred]
                if name in cells[i].binds:
                    break
    return found


def analyse(source: str) -> Cell:
    """What the code of a cell does to the names of its notebook; an empty ``Cell`` if it is not Python."""
    for text in (source, MAGIC.sub("", source)):
        with contextlib.suppress(SyntaxError):
            compile(text, "cell", "exec")
            break
    else:
        return Cell()
    cell, tree = Cell(text.strip()), ast.parse(text)
    cell.binds = _flow(tree.body, cell, set())
    cell.reads |= cell.deferred - cell.binds
    # From the inside out: what changes an item in an inner loop changes what the outer loop runs over.
    for node in reversed(list(ast.walk(tree))):
        if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            cell.changes |= _base(node)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            cell.called |= _base(node.value.func) if isinstance(node.value.func, ast.Attribute) else set()
        elif isinstance(node, ast.Import | ast.ImportFrom):
            cell.imports |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.For):
            over = {part.id for part in ast.walk(node.iter) if isinstance(part, ast.Name)}
            cell.changes |= over if _stored(node.target) & cell.changes else set()
            cell.called |= over if _stored(node.target) & cell.called else set()
    cell.only_imports = bool(cell.imports) and all(
        isinstance(statement, ast.Import | ast.ImportFrom | ast.Expr) for statement in tree.body
    )
    return cell


def _flow(statements: Sequence[ast.stmt], cell: Cell, bound: set[str]) -> set[str]:
    """The names that surely have a value after the statements; what these read and may replace goes into ``cell``."""
    for statement in statements:
        branched = isinstance(statement, ast.If)
        whole = ast.Expr(statement.test) if branched else statement
        loads, stores, deferred = _names(compile(ast.fix_missing_locations(ast.Module([whole], [])), "cell", "exec"))
        cell.reads |= loads - bound
        cell.deferred |= deferred
        branches = [node for node in ast.walk(whole) if isinstance(node, CONDITIONAL)]
        perhaps = stores & {name for branch in branches for name in _stored(branch)}
        bound = bound | (stores - perhaps)
        if branched:
            first, second = (_flow(branch, cell, bound) for branch in (statement.body, statement.orelse))
            perhaps, bound = first ^ second, first & second
        cell.changes |= perhaps - bound
    return bound


def _names(code: CodeType) -> tuple[set[str], set[str], set[str]]:
    """The global names that the code loads before it stores them, those it stores, and those its functions load."""
    loads, stores, deferred = set(), set(), set()
    for instruction in dis.get_instructions(code):
        operation, value = instruction.opname, instruction.argval
        if operation in ("LOAD_NAME", "LOAD_GLOBAL"):
            loads |= {value} - stores
        elif operation in ("STORE_NAME", "STORE_GLOBAL"):
            stores.add(value)
        elif isinstance(value, CodeType):
            inner, assigned, later = _names(value)
            deferred |= later
            if value.co_name in COMPREHENSIONS:
                loads |= inner - stores
                stores |= assigned
            elif value.co_flags & inspect.CO_NEWLOCALS:
                deferred |= inner
            else:  # The body of a class runs at once, with names of its own.
                loads |= inner - stores
    return loads, stores, deferred


def _stored(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def _base(node: ast.expr) -> set[str]:
    """The name at the bottom of attributes, items and calls: ``axes`` in ``axes.flat[0].set``."""
    while not isinstance(node, ast.Name):
        node = getattr(node, "value", None) or getattr(node, "func", None)
        if node is None:
            return set()
    return {node.id}


def setup(app: Sphinx) -> dict[str, bool]:
    """What Sphinx calls when it loads the extension."""
    app.connect("doctree-read", _add_buttons)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _add_buttons(app: Sphinx, page: nodes.document) -> None:
    sources = [node for node in page.findall(nodes.container) if node.get("nb_element") == "cell_code_source"]
    if not sources:
        return
    cells = read_notebook(app.env.doc2path(app.env.docname)).cells
    code = {index: cell.source for index, cell in enumerate(cells) if cell.cell_type == "code"}
    known, needed = orders(list(code.values()))
    # Of what stands on the page, the browser puts the script together.
    for node, cell, order in zip(sources, known, needed, strict=True):
        if cell.source:
            node += nodes.raw("", BUTTON % " ".join(map(str, order)), format="html")
