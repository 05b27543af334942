"""What a cell needs to run by itself, on planted notebooks."""

import math
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pandas as pd
import pytest
from copying import scripts, scripts_of
from nbformat.v4 import new_code_cell, new_notebook, new_output


def needed(*cells: str) -> list[str]:
    """The cells in the script of the last one, in their order."""
    script = scripts(cells)[-1]
    parts = [cell for cell in cells if cell in script]
    assert script == "\n\n".join(sorted(parts, key=script.index))
    return sorted(parts, key=script.index)


def test_a_chain_of_cells_and_nothing_beside_it():
    assert needed("a = 1", "b = a", "c = 3", "d = b") == ["a = 1", "b = a", "d = b"]


def test_imports_come_first_and_parameters_with_the_values_of_the_run_after_them():
    parameters, injected, imports = (
        "limit: int = 10",
        "# Parameters\nlimit = 3",
        "import math\nmath.factorial(3)",
    )
    script = scripts([parameters, injected, imports, "x = math.sqrt(limit)"])[-1]
    assert script == f"{imports}\n\n{injected}\n\nx = math.sqrt(limit)"


def test_a_constant_keeps_its_comment_with_the_value_that_ran():
    declared = 'limit: int = 10  # how many texts\nrest: str = "a"  # of no use'
    cells = [
        new_code_cell(declared, metadata={"tags": ["parameters"]}),
        new_code_cell("limit = 3", metadata={"tags": ["injected-parameters"]}),
        new_code_cell("print(limit)"),
    ]
    ran = {"analysis_lib": {"parameters": {"limit": 3, "rest": "a"}}}
    notebook = new_notebook(cells=cells, metadata=ran)
    assert scripts_of(notebook)[-1] == "limit: int = 3  # how many texts\n\nprint(limit)"


EXPERIMENT = "from analysis_book.papers import causes"
DRAWS = {"mystnb": {"figure": {"name": "fig-a", "caption": "A."}}}


def drawing(source: str, *cells: str, tables: list[dict]) -> str:
    """The script of a cell that draws these tables, after other cells."""
    output = new_output("display_data", {"text/csv": "x"}, metadata={"tables": tables})
    last = new_code_cell(source, outputs=[output], metadata=DRAWS)
    first = new_code_cell("", metadata={"tags": ["parameters"]})
    cells = [first, *map(new_code_cell, cells), last]
    about = {"analysis_lib": {"parameters": {}}}
    return scripts_of(new_notebook(cells=cells, metadata=about))[-1]


def described(*names: str, **others: object) -> dict:
    return {"names": [*names], "columns": [], "index": [], "texts": [], "orders": {}} | others


def test_a_figure_of_an_experiment_reads_the_table_under_it():
    cells = [f"{EXPERIMENT}\nimport seaborn as sns", "rows = causes.run()"]
    source = "some = rows[rows.x > 1]\naxes = sns.lineplot(some)\naxes.set(title=3)"
    script = drawing(source, *cells, tables=[described("some")])
    assert script == (
        "import seaborn as sns\nimport pandas as pd\n\n"
        '# The table under the figure.\nsome = pd.read_csv("fig-a.csv")\n\n'
        "axes = sns.lineplot(some)\naxes.set(title=3)"
    )
    # What is drawn beside it is an experiment, too; and no experiment is needed.
    more = source.replace("title=3", "title=len(rows)")
    assert "rows = causes.run()" in drawing(more, *cells, tables=[described("some")])
    usual = [cells[0], "rows = 3"]
    assert "read_csv" not in drawing(source, *usual, tables=[described("some")])


def test_a_table_that_is_read_draws_the_figure_that_the_experiment_drew(tmp_path):
    """With its index, the order of categories, texts that look like numbers, and beside another."""
    table = pd.DataFrame({"x": [3, 1], "size": ["1", "2"], "kind": ["b", "a"]})
    # No interval in a quick run: a column without a number is there, too.
    table["ci_low"] = math.nan
    table["kind"] = pd.Categorical(table["kind"], ["a", "b"])
    other = pd.DataFrame({"y": [2.5]}, index=pd.Index(["r"], name="row"))
    whole = pd.concat([t.reset_index(t.index.name and [t.index.name]) for t in (table, other)])
    whole.insert(0, "table", [0, 0, 1])
    whole.to_csv(tmp_path / "fig-a.csv", index=False)
    orders = {"columns": [*table], "texts": ["size"], "orders": {"kind": ["a", "b"]}}
    script = drawing(
        "sns.lineplot(table)\nsns.lineplot(other)",
        f"{EXPERIMENT}\nimport seaborn as sns",
        "table, other = causes.run()",
        tables=[
            described("table", **orders),
            described("other", columns=["row", "y"], index=["row"]),
        ],
    )
    script = script.replace("fig-a.csv", str(tmp_path / "fig-a.csv"))
    space = {}
    exec(script.partition("sns.lineplot")[0], space)
    pd.testing.assert_frame_equal(space["table"], table, check_dtype=False)
    assert space["table"]["kind"].cat.categories.tolist() == ["a", "b"]
    pd.testing.assert_frame_equal(space["other"], other)


def test_a_query_reads_the_names_in_its_string():
    cells = ["some = [1]", "rows = pd.DataFrame()", 'rows.query("step in @some and a == @rest.b")']
    assert needed(*cells) == cells
    assert needed("some = [1]", 'print("@some")') == ['print("@some")']


def test_a_cell_that_needs_nothing_is_itself():
    assert needed("a = 1", "b = 2") == ["b = 2"]


@pytest.mark.parametrize(
    "cell",
    [
        "x = 5\nprint(x)",
        "for x in range(3):\n    print(x)",
        "print([x for x in range(3)], {x: x for x in 'ab'}, sum(x for x in (1, 2)))",
        "print((lambda x: x + 1)(2))",
        "def f(x):\n    y = x\n    return y\nf(1)",
        "class A:\n    x = 5\n    y = x",
        "with open('f') as x:\n    x.read()",
        "try:\n    pass\nexcept ValueError as x:\n    print(x)",
        "def f():\n    return x\nx = 3\nf()",
        "print(x := 4, x)",
        "print(f'{[x for x in (1, 2)]}')",
    ],
)
def test_a_name_that_shadows_another_needs_no_cell(cell):
    assert needed("x = 1", "y = 2", cell) == [cell]


@pytest.mark.parametrize(
    "cell",
    [
        "x += 1",
        "x = x + 1",
        "print([y for y in range(x)])",
        "print([x for x in x])",
        "x: list = list(x)",
        "f = lambda y: x + y",
        "def f(y=x):\n    return y",
        "def f():\n    return x\nf()",
        "class A:\n    x = x",
        "for x in x:\n    pass",
        "if 1 < 2:\n    x = 2\nprint(x)",
        "if 1 < 2:\n    x = 2\nelse:\n    print(x)",
        "if x:\n    x = 2",
        "try:\n    x = 2\nexcept ValueError:\n    pass\nprint(x)",
        "x['a'] = 2",
        "x.a.b = 2",
        "del x[0]",
        "x.append(2)",
        "print(f'{x:.3f}')",
        "@x\ndef f(): ...",
    ],
)
def test_a_name_that_is_read_needs_its_cell(cell):
    assert needed("y = 0", "x = 1", cell) == ["x = 1", cell]


@pytest.mark.parametrize(
    "change",
    [
        'table["b"] = 2 * table["a"]',
        'table.loc[0, "a"] = 3',
        "table.attrs.x = 3",
        'table.insert(0, "b", 1)',
        'table.style.format("x").hide()',
        "table += 1",
        'del table["a"]',
        "for i in range(2):\n    table[i] = i",
        "for row in table:\n    row.clear()",
        "for i, row in zip(range(2), table, strict=True):\n    row.clear()",
        "for part in table.values():\n    for row in part:\n        row['a'] = 1",
        "if len(table):\n    table = table[1:]",
        "def double():\n    table['a'] = 2",
    ],
)
def test_a_cell_that_changes_a_value_is_needed_too(change):
    frame, result = 'table = {"a": 1}', "print(table)"
    assert needed(frame, change, "other = 1", result) == [frame, change, result]


@pytest.mark.parametrize(
    "reading",
    [
        "shown = table.head()",
        'print(table["a"])',
        "n = len(table)",
        "rows = [r.copy() for r in table]",
        "for axes, row in zip(grid, table):\n    axes.set(title=row)",
        "f(table)",
    ],
)
def test_a_cell_that_only_reads_a_value_is_not_needed(reading):
    assert needed("table = [1]", reading, "print(table)") == ["table = [1]", "print(table)"]


def test_the_last_cell_that_binds_a_name_wins():
    cells = "x = 1", "x.append(1)", "x = 2", "print(x)"
    assert needed(*cells) == ["x = 2", "print(x)"]
    assert scripts(cells)[1] == "x = 1\n\nx.append(1)"


def test_a_call_of_an_imported_module_changes_nothing():
    cells = (
        "import seaborn as sns",
        "sns.lineplot([1])",
        "sns.relplot([1]).set(title='a')",
        "sns.histplot([2])",
    )
    assert needed(*cells) == [cells[0], cells[3]]


def test_what_a_function_reads_is_read_when_it_is_called():
    cells = "def f():\n    return g() + scale", "def g():\n    return 1", "scale = 2", "print(f())"
    assert needed(*cells) == list(cells)
    assert scripts([*cells, "scale = 3"])[1] == cells[1]


def test_figures_of_earlier_cells_are_left_out():
    first, second = (
        "figure, axes = plt.subplots()\naxes.set(x=1)",
        "figure, axes = plt.subplots()\naxes.set(x=2)",
    )
    assert needed("import matplotlib.pyplot as plt", first, second) == [
        "import matplotlib.pyplot as plt",
        second,
    ]


def test_a_cell_that_is_not_python_has_no_script():
    assert scripts(["x = 1", "%%bash\necho hello", "print(x)", ""]) == [
        "x = 1",
        "",
        "x = 1\n\nprint(x)",
        "",
    ]


def test_scripts_run(tmp_path):
    cells = [
        "limit: int = 3",
        "import math",
        "rows = []\nfor i in range(limit):\n    rows.append(i)",
        "total = sum(rows)",
        "class A:\n    value = total\n\n\ndef root():\n    return math.sqrt(A.value + limit + "
        "more)",
        "more = 10",
        "print(root())",
    ]
    script = Path(tmp_path / "copied.py")
    script.write_text(scripts(cells)[-1])
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert run.stdout == "4.0\n"


BOOK = Path(__file__).parents[2] / "book"
SHIPPED = re.compile(r"shipping\.|trials\.recorded|claims\.published")
COMPUTES = re.compile(r"\b(measure|compare|load_model|finetunings|trials\.trials|load_runs)\(")


def test_the_script_of_a_figure_of_shipped_tables_is_short():
    """A reader who copies it gets the table and the plot, and no training."""
    long, short = [], 0
    for path in BOOK.rglob("*.ipynb"):
        cells = [cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]
        for cell, script in zip(cells, scripts([cell.source for cell in cells]), strict=True):
            if "mystnb" in cell.metadata and SHIPPED.search(script) and not COMPUTES.search(script):
                lines = sum(bool(line.strip()) for line in script.splitlines())
                short += lines <= 30
                if lines > 30:
                    long.append((cell.metadata["mystnb"]["figure"]["name"], lines))
    assert not long
    assert short >= 4
