"""The second copy button of a code cell: the cell with what it needs of the cells above it, as a script.

A Sphinx extension adds the button to the pages of notebooks (``_config.yml`` names it); ``book/_static/copying.js``
answers a click.
"""

import ast
import dis
import html
import inspect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType

from docutils import nodes
from sphinx.application import Sphinx

from analysis_lib.book.parameters import read_notebook

COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
CONDITIONAL = ast.If | ast.While | ast.Try | ast.Match
IMPORT = ast.Import | ast.ImportFrom
LABEL = "Copy with everything it needs"
BUTTON = f"""<button class="copy-everything o-tooltip--left" type="button" aria-label="{LABEL}"
 data-tooltip="{LABEL}" data-script="%s"><svg viewBox="0 0 24 24" aria-hidden="true"><path
 d="M4 8l8-4 8 4-8 4zM4 12l8 4 8-4M4 16l8 4 8-4"/></svg></button>"""


def scripts(cells: Sequence[str]) -> list[str]:
    """Each of a notebook's code cells as a script that runs by itself, or "" for a cell that is not Python.

    A script holds the statements above that give a value to the names that its cell reads, those that change these
    values, and so on; imports come first. A value is changed by an assignment to an attribute or an item of it, also
    of an item in a loop over it, and by a method called as a statement. What a cell of imports calls is kept. What a
    function does to an argument is not noticed.

    >>> print(scripts(["import math, sys", "r = 2\\ns = 3", "print(math.pi * r**2)"])[2])
    import math
    <BLANKLINE>
    r = 2
    <BLANKLINE>
    print(math.pi * r**2)
    """
    units = [unit for number, source in enumerate(cells) for unit in statements(number, source)]
    imported = {name for unit in units for name in unit.imports}
    for unit in units:
        unit.changes |= unit.called - imported
    return [_script(units, number) for number in range(len(cells))]


def _script(units: Sequence["Cell"], number: int) -> str:
    own = [i for i, unit in enumerate(units) if unit.number == number]
    kept = [i for i, unit in enumerate(units) if unit.sets_up and unit.number < number] + own if own else []
    needed = sorted({*kept, *itertools.chain(*(_needs(units, i, kept[-1] + 1) for i in kept))})
    first = [units[i] for i in needed if units[i].imports]
    parts = [_merged([unit.source for unit in first])] if first else []
    rest = [units[i] for i in needed if not units[i].imports]
    # What is set up stands with the imports.
    for (sets_up, _), group in itertools.groupby(rest, lambda unit: (unit.sets_up, unit.number)):
        text = "\n".join(unit.source for unit in group).strip("\n")
        parts = [f"{parts[0]}\n{text}", *parts[1:]] if sets_up and parts else [*parts, text]
    return "\n\n".join(parts)


def _merged(imports: Sequence[str]) -> str:
    """Imports of one name each, those from one module in a line."""
    lines: dict[str, list[str]] = {}
    for line in imports:
        start, word, name = line.rpartition(" import ") if line.startswith("from ") else (line, "", "")
        lines.setdefault(start + word, []).extend([name] if name else [])
    return "\n".join(start + ", ".join(dict.fromkeys(names)) for start, names in lines.items())


def statements(number: int, source: str) -> Iterator["Cell"]:
    """The statements of a cell, and what each does to the names of its notebook; imports of one name each."""
    try:
        lines, tree, end = source.splitlines(), ast.parse(source), 0
    except SyntaxError:  # Lines of IPython, or another language.
        return
    # What a cell calls right after its imports sets the notebook up.
    opening = list(itertools.takewhile(lambda node: isinstance(node, IMPORT | ast.Expr), tree.body))
    opening = opening if any(isinstance(node, IMPORT) for node in opening) else []
    for _, group in itertools.groupby(tree.body, lambda node: node.lineno):
        *_, node = nodes = [*group]
        part = "\n".join(lines[end : node.end_lineno])
        end = node.end_lineno
        if isinstance(node, IMPORT) and len(nodes) == 1:
            for alias in node.names:
                one = ast.unparse(type(node)(**{**vars(node), "names": [alias]}))
                yield Cell(one, number, binds={(alias.asname or alias.name).partition(".")[0]}, imported=True)
        else:
            yield analyse(part, number, sets_up=node in opening)


@dataclass
class Cell:
    """What a statement of a cell does to the names of its notebook."""

    source: str = ""
    number: int = 0  # of the cell of the notebook
    reads: set[str] = field(default_factory=set)  # names whose earlier value it needs
    deferred: set[str] = field(default_factory=set)  # names that its functions read whenever they are called
    binds: set[str] = field(default_factory=set)  # names that have a value from here on
    changes: set[str] = field(default_factory=set)  # names whose value it changes, or may replace
    called: set[str] = field(default_factory=set)  # names with a method called as a statement: rows.append(1)
    imported: bool = False  # whether it is an import
    sets_up: bool = False  # whether it is a call in a cell of imports

    @property
    def imports(self) -> set[str]:
        """The names that it imports."""
        return self.binds if self.imported else set()


def _needs(cells: Sequence[Cell], index: int, end: int) -> set[int]:
    """The statements above that a statement depends on; what its functions read, they read at ``end``."""
    found: set[int] = set()
    seen: set[tuple[str, int]] = set()
    queue = [(name, index) for name in cells[index].reads] + [(name, end) for name in cells[index].deferred]
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


def analyse(source: str, number: int, sets_up: bool) -> Cell:
    """What a statement of a cell does to the names of its notebook."""
    tree = ast.parse(source)
    reads, stores, deferred = _names(compile(tree, "cell", "exec"))
    branches = [node for node in ast.walk(tree) if isinstance(node, CONDITIONAL)]
    # What a branch stores may keep its earlier value.
    perhaps = stores & {name for branch in branches for name in _named(branch, ast.Store)}
    reads |= perhaps & _named(tree, ast.Load)
    cell = Cell(source, number, reads, deferred, stores - perhaps, perhaps, sets_up=sets_up)
    # A function that is only defined here reads when it is called.
    if not isinstance(tree.body[-1], ast.FunctionDef):
        cell.reads |= cell.deferred - cell.binds
    # From the inside out: what changes an item in an inner loop changes what the outer loop runs over.
    for node in reversed(list(ast.walk(tree))):
        if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            cell.changes |= _base(node)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            cell.called |= _base(node.value.func) if isinstance(node.value.func, ast.Attribute) else set()
        elif isinstance(node, ast.For):
            over = {part.id for part in ast.walk(node.iter) if isinstance(part, ast.Name)}
            cell.changes |= over if _named(node.target, ast.Store) & cell.changes else set()
            cell.called |= over if _named(node.target, ast.Store) & cell.called else set()
    return cell


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


def _named(tree: ast.AST, how: type[ast.expr_context]) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, how)}


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
    cells = read_notebook(Path(app.env.doc2path(app.env.docname))).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    shown = [cell for cell in code if "injected-parameters" not in cell.metadata.get("tags", ())]
    whole = dict(zip(map(id, code), scripts([cell.source for cell in code]), strict=True))
    for node, cell in zip(sources, shown, strict=True):
        if script := whole[id(cell)]:
            node += nodes.raw("", BUTTON % html.escape(script), format="html")
