"""The ledger of claims, from planted notebooks."""

from dataclasses import replace
from pathlib import Path

import nbformat
import numpy as np
import pandas as pd
import pytest
from ledger import Ledger
from nbformat.v4 import new_code_cell, new_notebook, new_output
from planted import shown

from analysis_book.build.ledger import NOT_RUN, ledger, outcomes
from analysis_book.papers import claims
from analysis_book.papers.claims import FAILS, HOLDS, UNDECIDED, judged
from analysis_lib.metrics.intervals import Estimate

EARLY, MIDDLE, COSINE = "maruta-early-cls", "maruta-middle-sep", "godey-anisotropic-layer"


def page(path: Path, rows: list[dict], *names: str) -> Path:
    """An executed notebook that has drawn figures of these names and shows verdicts."""
    data, metadata = shown(pd.DataFrame(rows))._repr_mimebundle_()
    drawn = [new_code_cell("", metadata={"mystnb": {"figure": {"name": name}}}) for name in names]
    cells = [
        *drawn,
        new_code_cell("", outputs=[new_output("display_data", data, metadata=metadata)]),
    ]
    path.parent.mkdir(exist_ok=True)
    nbformat.write(new_notebook(cells=cells), path)
    return path


@pytest.fixture
def executed(tmp_path) -> dict[str, Path]:
    """Two executed notebooks with verdicts on three claims; their bounds are 0."""
    strong, weak = Estimate(0.5, 0.4, 0.6, 20), Estimate(0.01, 0.001, 0.019, 20)
    attention = [judged(EARLY, strong, "40 texts"), judged(MIDDLE, weak), judged(MIDDLE, weak)]
    models = [{"model": name} for name in ("MiniLM", "MiniLM", "MPNet")]
    attention = [row | model for row, model in zip(attention, models, strict=True)]
    return {
        "outliers/attention": page(
            tmp_path / "outliers" / "attention.ipynb", attention, "fig-attention-weight"
        ),
        "anisotropy/text": page(
            tmp_path / "anisotropy" / "text.ipynb", [judged(COSINE, Estimate(0.1, 0.0, 0.2, 20))]
        ),
    }


def test_the_ledger_has_every_verdict_and_every_claim_without_one(executed):
    rows = ledger(executed)
    every = [name for paper in claims.PAPERS for name in claims.load(paper)]
    assert rows["id"].drop_duplicates().tolist() == every
    found = rows[rows["verdict"] != NOT_RUN]
    assert found["id"].tolist() == [COSINE, EARLY, MIDDLE, MIDDLE]
    first = found.set_index("id").loc[EARLY]
    assert first[["value", "ci_low", "ci_high", "model", "sample"]].tolist() == [
        0.5,
        0.4,
        0.6,
        "MiniLM",
        "40 texts",
    ]
    assert first[["paper", "claim"]].tolist() == [
        claims.PAPERS["maruta"],
        claims.claim(EARLY).sentence,
    ]
    missing = rows[rows["verdict"] == NOT_RUN]
    assert np.isnan(missing["value"]).all()
    assert missing["judged_by"].tolist() == [claims.claim(name).page for name in missing["id"]]


def test_the_ledger_corrects_over_the_models_of_a_claim(executed):
    """Alone, p = 0.03 holds; of the two on one claim, the smaller would have to be below 0.025."""
    rows = ledger(executed).set_index("id")
    assert rows.loc[MIDDLE, ["verdict", "after"]].to_numpy().tolist() == 2 * [[HOLDS, UNDECIDED]]
    assert rows.loc[EARLY, ["verdict", "after"]].tolist() == [HOLDS, HOLDS]


def test_the_same_number_on_two_pages_counts_once(executed):
    twice = executed | {"outliers/again": executed["outliers/attention"]}
    pd.testing.assert_frame_equal(ledger(twice), ledger(executed))


def test_what_the_book_no_longer_claims_has_no_row(executed):
    path = executed["anisotropy/text"]
    notebook = nbformat.read(path, 4)
    notebook.cells[-1].outputs[0].metadata["verdicts"][0]["id"] = "godey-of-old"
    nbformat.write(notebook, path)
    assert set(ledger(executed).query("verdict != @NOT_RUN")["id"]) == {EARLY, MIDDLE}


def test_a_number_leads_to_the_first_figure_of_its_page_that_shows_it(executed, monkeypatch):
    every = claims.load("maruta")
    planted = every | {EARLY: replace(every[EARLY], figures=["fig-other", "fig-attention-weight"])}
    planted[MIDDLE] = replace(every[MIDDLE], figures=["fig-of-another-page"])
    monkeypatch.setattr(
        claims,
        "load",
        lambda paper, load=claims.load: planted if paper == "maruta" else load(paper),
    )
    rows = ledger(executed)
    assert rows.set_index("id").loc[EARLY, "figure"] == "fig-attention-weight"
    of_claim = {name: Ledger._line(None, part) for name, part in rows.groupby("id")}
    assert '<a href="outliers/attention.html#fig-attention-weight">MiniLM</a>' in of_claim[EARLY]
    assert "0.500 [0.400, 0.600]" in of_claim[EARLY]
    # Without one, to the verdict; and what is judged on nothing that has a name is judged there.
    assert f'<a href="outliers/attention.html#{MIDDLE}">MPNet</a>' in of_claim[MIDDLE]
    assert f'<a href="anisotropy/text.html#{COSINE}">here</a>' in of_claim[COSINE]


def test_a_claim_that_was_not_run_says_what_it_needs(executed):
    rows = ledger(executed)
    (claim,) = rows[rows["id"] == "godey-decoder-extreme"].to_dict("records")
    text = Ledger._line(None, rows[rows["id"] == claim["id"]])
    assert f'<span class="chip">{NOT_RUN}</span>' in text
    assert "It needs an encoder-decoder, such as t5-base or byt5-base." in text


def test_without_a_page_no_claim_was_run():
    rows = ledger({})
    assert set(rows["verdict"]) == {NOT_RUN}
    assert set(outcomes(rows)["outcome"]) == {NOT_RUN}


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        ([HOLDS, "no interval"], HOLDS),
        ([HOLDS, UNDECIDED, "no interval"], "mixed"),
        ([FAILS, "not applicable"], FAILS),
        ([HOLDS, FAILS, HOLDS], "mixed"),
        ([UNDECIDED, "not applicable"], UNDECIDED),
        (["no interval", "not applicable"], "without a verdict"),
        ([NOT_RUN], NOT_RUN),
    ],
)
def test_the_outcome_of_a_claim_is_over_all_that_it_was_judged_on(after, expected):
    rows = pd.DataFrame({"id": "a", "paper": "P", "after": after})
    assert outcomes(rows).to_numpy().tolist() == [["a", "P", expected]]
