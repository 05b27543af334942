"""How the code of both packages reads: how much stands on a line, and by which words it goes.

The code of notebooks goes by the same words.
"""

import ast
import io
import json
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Of code on a line: what no language counts as a word is left out, and so are docstrings.
MOST_TOKENS = 9.5
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
# Names that say nothing of what they stand for.
VAGUE = {"found", "told", "asked", "lacking", "senseless", "place", "one", "who"}
COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
WITH_DOCSTRING = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def packages() -> Iterator[tuple[str, list[Path]]]:
    """The modules of each package of the library and of the book, and of those right below them."""
    for home in (ROOT / "analysis_lib", ROOT / "book" / "analysis_book"):
        yield home.name, sorted(home.glob("*.py"))
        for folder in sorted(home.iterdir()):
            modules = sorted(folder.rglob("*.py"))
            if modules:
                yield f"{home.name}.{folder.name}", modules


PACKAGES = dict(packages())
each_package = pytest.mark.parametrize("name", PACKAGES)
BOOK = ROOT / "book"
# Those of reports, too.
NOTEBOOKS = [
    path.relative_to(BOOK).as_posix()
    for path in sorted(BOOK.rglob("*.ipynb"))
    if ".ipynb_checkpoints" not in path.parts
]


def docstring_lines(tree: ast.Module) -> set[int]:
    lines = set()
    for node in ast.walk(tree):
        if isinstance(node, WITH_DOCSTRING) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            lines |= set(range(docstring.lineno, docstring.end_lineno + 1))
    return lines


def tokens_and_lines(text: str) -> tuple[int, int]:
    """How many tokens of code there are, and on how many lines."""
    docstrings = docstring_lines(ast.parse(text))
    tokens = 0
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE and token.start[0] not in docstrings:
            tokens += 1
            # A text of many lines is one token, and no code.
            lines.add(token.start[0])
    return tokens, len(lines)


def test_tokens_and_lines_are_those_of_code():
    text = '"""Words."""\n\n\ndef f(x):\n    """Words."""\n    return x  # words\n'
    assert tokens_and_lines(text) == (8, 2)


@each_package
def test_little_stands_on_a_line(name):
    counts = [tokens_and_lines(path.read_text(encoding="utf-8")) for path in PACKAGES[name]]
    tokens = sum(count for count, _ in counts)
    lines = sum(count for _, count in counts)
    assert tokens / lines <= MOST_TOKENS


def hard_to_read(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The lines that a reader has to read twice, and why."""
    for node in ast.walk(tree):
        if isinstance(node, COMPREHENSIONS):
            for inner in ast.walk(node):
                if inner is not node and isinstance(inner, COMPREHENSIONS):
                    yield inner.lineno, "a comprehension inside a comprehension"
        if isinstance(node, ast.Call):
            for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
                if isinstance(argument, ast.IfExp):
                    yield argument.lineno, "a conditional expression as an argument"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from vague_names(node)


def vague_names(tree: ast.FunctionDef | ast.Module) -> Iterator[tuple[int, str]]:
    """The parameters and names given in a function, or anywhere in a cell, that are vague."""
    for node in ast.walk(tree):
        name = ""
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.arg):
            name = node.arg
        if name in VAGUE:
            yield node.lineno, f"a name that says nothing: {name}"


def test_what_is_hard_to_read_is_seen():
    text = "def f(one, x):\n    found = [len(y if y else x) for y in (z for z in one)]\n"
    reasons = [reason.split(":")[0] for _, reason in hard_to_read(ast.parse(text))]
    assert sorted(reasons) == [
        "a comprehension inside a comprehension",
        "a conditional expression as an argument",
        "a name that says nothing",
        "a name that says nothing",
    ]


def hard_in_cell(source: str) -> set[tuple[int, str]]:
    """What is hard to read in a cell; its names outside functions count, as other cells read
    them.
    """
    tree = ast.parse(source)
    return {*hard_to_read(tree), *vague_names(tree)}


def test_a_vague_name_outside_functions_is_seen_in_a_cell():
    source = "found = 1\nfor place in x:\n    print(place)\n\ndef f(one): ...\n"
    assert [line for line, _ in sorted(hard_in_cell(source))] == [1, 2, 5]


@each_package
def test_no_line_has_to_be_read_twice(name):
    faults = []
    for path in PACKAGES[name]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        faults += [f"{path.name}:{line}: {reason}" for line, reason in hard_to_read(tree)]
    assert not faults


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_no_line_of_a_notebook_has_to_be_read_twice(name):
    faults = []
    cells = json.loads((BOOK / name).read_text(encoding="utf-8"))["cells"]
    for number, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            hard = sorted(hard_in_cell("".join(cell["source"])))
            faults += [f"cell {number}, line {line}: {reason}" for line, reason in hard]
    assert not faults
