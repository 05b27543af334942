"""What pages found, hoisted; the ledger of claims, from planted notebooks; and the icons that pages load."""

import base64
from pathlib import Path

import nbformat
import numpy as np
import pytest
from findings import figure, found
from icons import subset
from ledger import NOT_RUN, _row, ledger
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from analysis_lib.papers import claims


def shown(data: dict, metadata: dict | None = None, **of_cell) -> nbformat.NotebookNode:
    """A cell that has displayed something."""
    return new_code_cell("", outputs=[new_output("display_data", data, metadata=metadata or {})], metadata=of_cell)


def test_what_is_found_is_the_output_of_the_tagged_cell():
    cells = [
        new_markdown_cell("# A"),
        shown({"text/markdown": "other"}),
        shown({"text/markdown": "- one\n- two"}, tags=["found"]),
    ]
    assert found(new_notebook(cells=cells)) == "- one\n- two"
    assert found(new_notebook(cells=cells[:2])) == ""


def test_a_figure_is_the_picture_of_the_cell_of_its_name():
    picture = {"image/png": base64.b64encode(b"png").decode()}
    about = {"figure": {"name": "fig-a", "caption": "A."}, "image": {"alt": "a line"}}
    notebook = new_notebook(cells=[shown({"text/plain": "x"}), shown(picture, mystnb=about)])
    assert figure(notebook, "fig-a") == (b"png", "a line")
    assert figure(notebook, "fig-b") is None


@pytest.fixture
def executed(tmp_path) -> dict[str, Path]:
    """Two executed notebooks with three verdicts on two claims."""
    strong, weak, other = "maruta-early-cls", "maruta-middle-sep", "godey-anisotropic-layer"
    found = claims.verdicts_of_estimates({strong: (0.5, 0.4, 0.6, 20), weak: (0.01, 0.001, 0.019, 20)})
    tables = {
        "outliers/attention": claims.verdict_table(found.assign(model="minilm"), "tbl-a", "A."),
        "anisotropy/text": claims.verdict_table(
            claims.verdicts_of_estimates({other: (0.1, 0.0, 0.2, 20)}), "tbl-b", "B."
        ),
    }
    paths = {}
    for name, table in tables.items():
        cell = shown({"text/markdown": table._repr_markdown_()}, metadata=table.metadata)
        (tmp_path / name).parent.mkdir()
        nbformat.write(new_notebook(cells=[cell]), tmp_path / f"{name}.ipynb")
        paths[name] = tmp_path / f"{name}.ipynb"
    return paths


def test_the_ledger_has_every_verdict_and_every_claim_without_one(executed):
    rows = ledger(executed)
    every = [name for paper in claims.PAPERS for name in claims.load(paper)]
    assert rows["id"].tolist() == every
    judged = rows[rows["verdict"] != NOT_RUN].set_index("id")
    assert set(judged.index) == {"maruta-early-cls", "maruta-middle-sep", "godey-anisotropic-layer"}
    row = judged.loc["maruta-early-cls"]
    assert row[["value", "ci_low", "ci_high", "on", "table"]].tolist() == [0.5, 0.4, 0.6, "minilm", "tbl-a"]
    assert np.isnan(rows["value"][rows["verdict"] == NOT_RUN]).all()


def test_the_ledger_corrects_over_all_pages(executed):
    """Alone, p = 0.03 holds; as the second of three it would have to be below 0.025."""
    rows = ledger(executed).set_index("id")
    assert rows.loc["maruta-middle-sep", ["verdict", "corrected"]].tolist() == ["holds", "undecided"]
    assert rows.loc["maruta-early-cls", ["verdict", "corrected"]].tolist() == ["holds", "holds"]


def test_a_row_of_the_ledger_leads_to_the_table_that_judges(executed):
    rows = ledger(executed).set_index("id", drop=False)
    text = _row(rows.loc["maruta-early-cls"].to_dict())
    assert 'href="outliers/attention.html#tbl-a"' in text
    assert "0.500 [0.400, 0.600]" in text
    assert "above 0<" in text
    unknown = _row(rows.loc["fosse-few-tokens"].to_dict())
    assert 'data-verdict="not run"' in unknown
    assert 'href="classification/tokens.html"' in unknown


def test_icons_are_kept_by_any_of_their_names():
    kept = 'bars:[448,512,["navicon"],"f0c9","M0"],"angle-left":[320,512,[8249],"f104",["M1","M2"]],'
    script = "x={" + kept + 'xmark:[1,2,[],"f0","M3"]},y'
    assert subset(script, {"navicon", "angle-left"}) == "x={" + kept + "},y"
    assert subset(script, set()) == "x={},y"
