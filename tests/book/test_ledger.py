"""The ledger of claims, from planted notebooks."""

from dataclasses import replace
from pathlib import Path

import nbformat
import numpy as np
import pytest
from ledger import _row
from nbformat.v4 import new_code_cell, new_notebook, new_output

from analysis_lib.book.ledger import NOT_RUN, ledger
from analysis_lib.papers import claims


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
        shown = new_output("display_data", {"text/markdown": table._repr_markdown_()}, metadata=table.metadata)
        (tmp_path / name).parent.mkdir()
        nbformat.write(new_notebook(cells=[new_code_cell("", outputs=[shown])]), tmp_path / f"{name}.ipynb")
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
    needed = rows.set_index("id")["on"]
    assert needed["godey-decoder-extreme"] == "needs an encoder-decoder, such as t5-base or byt5-base"
    assert needed["godey-anisotropic-layer"] != needed["maruta-late-punctuation"] == "needs a run of its page"


def test_the_ledger_corrects_over_all_pages(executed):
    """Alone, p = 0.03 holds; as the second of three it would have to be below 0.025."""
    rows = ledger(executed).set_index("id")
    assert rows.loc["maruta-middle-sep", ["verdict", "corrected"]].tolist() == ["holds", "undecided"]
    assert rows.loc["maruta-early-cls", ["verdict", "corrected"]].tolist() == ["holds", "holds"]


def test_the_same_number_on_two_pages_counts_once(executed):
    twice = executed | {"outliers/again": executed["outliers/attention"]}
    assert len(ledger(twice)) == len(ledger(executed))


def test_a_page_on_one_model_is_judged_on_it(executed):
    path = executed["anisotropy/text"]
    notebook = nbformat.read(path, 4)
    notebook.metadata["analysis_lib"] = {"parameters": {"model": "mine", "data": "news"}}
    nbformat.write(notebook, path)
    assert ledger(executed).set_index("id").loc["godey-anisotropic-layer", "on"] == "mine, news"


def test_a_row_that_names_its_model_is_not_of_the_corpus_of_the_page(executed):
    """A shipped or fine-tuned model beside that of the page was measured on data of its own."""
    path = executed["outliers/attention"]
    notebook = nbformat.read(path, 4)
    notebook.metadata["analysis_lib"] = {"parameters": {"model": "mine", "data": "news", "run": "bert-4"}}
    nbformat.write(notebook, path)
    assert ledger(executed).set_index("id").loc["maruta-early-cls", "on"] == "minilm"


@pytest.fixture
def shown(monkeypatch) -> None:
    """A claim whose number two figures may show."""
    every = claims.load("maruta")
    told = every | {"maruta-early-cls": replace(every["maruta-early-cls"], figures=["fig-other", "fig-a"])}
    monkeypatch.setattr(claims, "load", lambda paper, load=claims.load: told if paper == "maruta" else load(paper))


def drawn(name: str, csv: str) -> nbformat.NotebookNode:
    """A cell that has drawn a figure from some numbers."""
    output = new_output("display_data", {"text/csv": csv})
    return new_code_cell("", outputs=[output], metadata={"mystnb": {"figure": {"name": name}}})


def test_a_number_leads_to_the_figure_of_its_page_that_shows_it(executed, shown):
    path = executed["outliers/attention"]
    notebook = nbformat.read(path, 4)
    notebook.cells += [drawn("fig-other", "model,x\nminilm-2,1\n"), drawn("fig-a", "model,x\nminilm,1\n")]
    nbformat.write(notebook, path)
    rows = ledger(executed).set_index("id", drop=False)
    assert rows.loc["maruta-early-cls", ["figure", "subject"]].tolist() == ["fig-a", "minilm"]
    assert rows.loc["maruta-middle-sep", "figure"] == ""
    assert '<a href="outliers/attention.html#fig-a">0.500</a> [0.400' in _row(rows.loc["maruta-early-cls"].to_dict())


def test_a_figure_of_a_page_on_one_model_need_not_name_it_and_is_of_no_other(executed, shown):
    path = executed["outliers/attention"]
    notebook = nbformat.read(path, 4)
    notebook.cells.append(drawn("fig-a", "layer,weight\n1,0.5\n"))
    for model, figure in {"minilm": "fig-a", "other": ""}.items():
        notebook.metadata["analysis_lib"] = {"parameters": {"model": model}}
        nbformat.write(notebook, path)
        assert ledger(executed).set_index("id").loc["maruta-early-cls", "figure"] == figure


def test_without_a_page_no_claim_was_run():
    assert set(ledger({})["verdict"]) == {NOT_RUN}


def test_a_row_of_the_ledger_leads_to_the_table_that_judges(executed):
    rows = ledger(executed).set_index("id", drop=False)
    text = _row(rows.loc["maruta-early-cls"].to_dict())
    assert 'href="outliers/attention.html#tbl-a"' in text
    assert "0.500 [0.400, 0.600]" in text
    assert "above 0<" in text
    unknown = _row(rows.loc["fosse-few-tokens"].to_dict())
    assert 'data-verdict="not run"' in unknown
    assert 'href="classification/tokens.html"' in unknown
