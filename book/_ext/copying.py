"""The second copy button of a code cell: a script of it and what it needs of the cells above.

Where that is an experiment of the book, the script of a figure reads the table under it instead.

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
from notebooks import FIGURES, show_parameters, table_ending
from sphinx.application import Sphinx

from analysis_book.build.parameters import read_notebook

IMPORT = gast.Import | gast.ImportFrom
# Methods of pandas that read names of the cell in a string.
QUERIES = ("query", "eval")
# How the names of seaborn's functions that draw end.
DRAWING = ("plot", "heatmap")
# What experiments are imported from.
EXPERIMENTS = re.compile(r"\banalysis_book\.(papers|training)\b|\bimport (papers|training)\b")
LABEL = "Copy with everything it needs"
LABEL_OF_TABLE = "Copy with the table that it draws"
BUTTON = """<button class="copy-everything o-tooltip--left" type="button" aria-label="{label}"
 data-tooltip="{label}" data-script="{script}" data-table="{table}">
<svg viewBox="0 0 24 24" aria-hidden="true"><path
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


def last_script(cells: Sequence[str]) -> str:
    """The script of the last of a notebook's code cells, see :func:`scripts`."""
    units = []
    for number, source in enumerate(cells):
        units += statements(number, source)
    return _script(units, len(cells) - 1)


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
            changed_names = {name.id for name in changed}
            for items, source in _run_over(node):
                if changed_names & {name.id for name in _names(items)}:
                    changed |= _names(source)
    return changed


def _run_over(loop: gast.For) -> list[tuple[gast.AST, gast.AST]]:
    """The items of a loop and what they are items of; of ``zip``, each beside its own."""
    target, source = loop.target, loop.iter
    zipped = isinstance(source, gast.Call) and getattr(source.func, "id", "") == "zip"
    if zipped and isinstance(target, gast.Tuple) and len(target.elts) == len(source.args):
        return [*zip(target.elts, source.args, strict=True)]
    return [(target, source)]


def _names(tree: gast.AST) -> set[gast.Name]:
    return {name for name in gast.walk(tree) if isinstance(name, gast.Name)}


def _base(node: gast.AST) -> set[gast.Name]:
    """The name at the bottom of attributes, items and calls: ``axes`` in ``axes.flat[0].set``."""
    while not isinstance(node, gast.Name):
        node = getattr(node, "value", None) or getattr(node, "func", None)
        if node is None:
            return set()
    return {node}


def scripts_of(notebook: NotebookNode) -> list[str]:
    """The scripts of an executed notebook's code cells, with the parameters that ran.

    They have their comments from the cell that declares them. A figure whose script would run an
    experiment of the book reads its table, a CSV file by its name.
    """
    show_parameters(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    sources = [cell.source for cell in cells]
    whole = scripts(sources)
    for number, cell in enumerate(cells):
        reading = reads_tables(cell)
        if not reading or not EXPERIMENTS.search(whole[number]):
            continue
        computing, drawing = parts_of(cell.source)
        drawing = last_script([*sources[:number], computing, reading, drawing])
        if not EXPERIMENTS.search(drawing):
            whole[number] = drawing
    return whole


def parts_of(source: str) -> tuple[str, str]:
    """The statements of a cell before the first in which seaborn draws, and the rest.

    >>> parts_of("x = f(1)\\naxes = sns.lineplot(x)\\naxes.set(title='x')")
    ('x = f(1)', "axes = sns.lineplot(x)\\naxes.set(title='x')")
    """
    lines = source.splitlines()
    for statement in gast.parse(source).body:
        for node in gast.walk(statement):
            if isinstance(node, gast.Attribute) and node.attr.endswith(DRAWING):
                start = statement.lineno - 1
                return "\n".join(lines[:start]), "\n".join(lines[start:])
    return source, ""


def csv_of(cell: NotebookNode) -> str:
    """The name of the file with the table under the figure of a cell; "" without a table."""
    name = cell.metadata.get("mystnb", {}).get("figure", {}).get("name")
    for output in cell.get("outputs", ()):
        if name and "text/csv" in output.get("data", {}):
            ending = table_ending(output.data["text/csv"].encode())
            return f"{name}.{ending}"
    return ""


def reads_tables(cell: NotebookNode) -> str:
    """A cell that reads what a cell draws from the table under its figure; "" if it has none.

    The metadata of its outputs are described in ``analysis_book/build/recording.py``.
    """
    tables = []
    for output in cell.get("outputs", ()):
        tables += output.get("metadata", {}).get("tables", ())
    name_of_file = csv_of(cell)
    if not tables or not name_of_file:
        return ""
    lines = ["import pandas as pd", "", "# The table under the figure."]
    for number, table in enumerate(tables):
        file = f'"{name_of_file}"'
        if table["texts"]:
            file += f", dtype={dict.fromkeys(table['texts'], 'str')}"
        reading = f"pd.read_csv({file})"
        if len(tables) > 1:
            reading += f'.query("table == {number}")[{table["columns"]}]'
        if table["index"]:
            reading += f".set_index({table['index']})"
        for name in table["names"]:
            lines.append(f"{name} = {reading}")
            for column, order in table["orders"].items():
                of_column = f'{name}["{column}"]'
                lines.append(f"{of_column} = pd.Categorical({of_column}.astype(str), {order})")
    return "\n".join(lines)


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
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    folder = "../" * app.env.docname.count("/") + FIGURES.as_posix()
    for node, cell, script in zip(sources, cells, whole, strict=True):
        if script:
            node += nodes.raw("", _button(script, csv_of(cell), folder), format="html")


def _button(script: str, table: str, folder: str) -> str:
    """The button of a script, with the address of the table that it reads, if it reads one."""
    address = label = ""
    if table and f'"{table}"' in script:
        address = f"{folder}/{table}"
        script = script.replace(f'"{table}"', f'"{address}"')
        label = LABEL_OF_TABLE
    return BUTTON.format(label=label or LABEL, script=html.escape(script), table=address)
