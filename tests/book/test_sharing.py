"""What pages say of the machine that they were made on: the names of models and data, not the way
to them.
"""

import json
from html import escape

import nbformat
import pytest
import tiny

from analysis_book.build.sharing import data_name, data_to_share, parameters_to_share, to_share
from analysis_book.figures.markup import plain


def test_parameters_name_models_runs_and_data_and_nothing_else_changes():
    given = {
        "model": "/home/jane/a model+/home/jane/adapters/legal@dtype=bfloat16",
        "models": [
            "minilm",
            "google/canine-c",
            "models/own",
            "/home/jane/x/gpt",
            "/home/jane/y/gpt:untrained@seed=2",
        ],
        "run": "/home/jane/trainer",
        "data": "/home/jane/reviews.csv:text/of all",
        "text_data": "../photos/",
        "options": {"tokenizer": "/home/jane/vocabulary", "units": "a/b"},
        "limit": 7,
        "note": "/home/jane/x",
    }
    assert parameters_to_share(given) == {
        "model": "a model+legal@dtype=bfloat16",
        "models": ["minilm", "google/canine-c", "models/own", "gpt", "gpt:untrained@seed=2"],
        "run": "trainer",
        "data": "reviews.csv:text/of all",
        "text_data": "photos",
        "options": {"tokenizer": "vocabulary", "units": "a/b"},
        "limit": 7,
        "note": "/home/jane/x",
    }


@pytest.mark.parametrize("column", ["text", "a/b", "with:colon"])
def test_a_path_with_colons_is_known_by_the_file_that_is_there(column, tmp_path):
    table = tmp_path / "of: all" / "x:y.csv"
    table.parent.mkdir()
    table.write_text("text\n")
    assert data_to_share(f"{table}:{column}") == f"x:y.csv:{column}"
    assert data_name(f"{table}:{column}") == f"x:y.csv:{column}"


def test_what_cells_have_shown_is_without_the_way_in_every_form(tmp_path):
    home = tmp_path / "jane's_own <folder>"
    home.mkdir()
    (home / "lines.txt").write_text("\n".join(tiny.TEXTS))
    data = f"{home}/lines.txt"
    forms = [data, plain(data), escape(data), json.dumps(data)]
    outputs = [
        nbformat.v4.new_output("display_data", {"text/html": form, "text/markdown": [form]})
        for form in forms
    ]
    cells = [
        nbformat.v4.new_code_cell('data: str = "news"', metadata={"tags": ["parameters"]}),
        nbformat.v4.new_code_cell(f"data = {data!r}", metadata={"tags": ["injected-parameters"]}),
        nbformat.v4.new_code_cell("display(data)", outputs=outputs),
    ]
    record = {"parameters": {"data": data}, "changed": ["data"]}
    shared = to_share(nbformat.v4.new_notebook(cells=cells, metadata={"analysis_lib": record}))
    text = nbformat.writes(shared)
    assert "jane" not in text
    assert 'data = "lines.txt"' in shared.cells[1].source
    assert [*shared.metadata["analysis_lib"]["inputs"]] == ["data lines.txt"]
    assert [output["data"]["text/html"] for output in shared.cells[2].outputs] == [
        "lines.txt", r"lines\.txt", "lines.txt", '"lines.txt"',
    ]  # fmt: skip
