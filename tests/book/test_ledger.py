"""The ledger of claims, from planted notebooks."""

import re
from dataclasses import replace
from pathlib import Path

import nbformat
import numpy as np
import pandas as pd
import pytest
from ledger import Counts, Ledger
from nbformat.v4 import new_code_cell, new_notebook, new_output
from planted import shown

from analysis_book.build.ledger import NOT_RUN, by_chance, ledger, outcomes
from analysis_book.papers import claims
from analysis_book.papers.claims import FAILS, HOLDS, SMALL, UNDECIDED, judged
from analysis_lib.metrics.intervals import Estimate

EARLY, MIDDLE, COSINE = "maruta-early-cls", "maruta-middle-sep", "godey-anisotropic-layer"
OWN = "maruta-middle-typed-gap"


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
    every = [claim for paper in claims.PAPERS for claim in claims.load(paper).values()]
    # Those that no paper makes come last.
    names = [claim.id for ours in (False, True) for claim in every if claim.ours == ours]
    assert rows["id"].drop_duplicates().tolist() == names
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
    assert f'<span class="chip none">{NOT_RUN}</span>' in text
    assert "It needs an encoder-decoder, such as t5-base or byt5-base." in text


def test_without_a_page_no_claim_was_run():
    rows = ledger({})
    assert set(rows["verdict"]) == {NOT_RUN}
    assert set(outcomes(rows)["outcome"]) == {NOT_RUN}


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        ([HOLDS, "no interval"], HOLDS),
        ([HOLDS, SMALL], SMALL),
        ([SMALL, FAILS], "mixed"),
        ([HOLDS, UNDECIDED, "no interval"], "mixed"),
        ([FAILS, "not applicable"], FAILS),
        ([HOLDS, FAILS, HOLDS], "mixed"),
        ([UNDECIDED, "not applicable"], UNDECIDED),
        (["no interval", "not applicable"], "without a verdict"),
        ([NOT_RUN], NOT_RUN),
    ],
)
def test_the_outcome_of_a_claim_is_over_all_that_it_was_judged_on(after, expected):
    rows = pd.DataFrame({"id": "a", "paper": "P", "after": after, "scope": "paper"})
    assert outcomes(rows).to_numpy().tolist() == [["a", "P", expected]]


def test_other_models_do_not_count_against_a_paper(tmp_path):
    """BERT-base is the model of the paper; a claim of ours has no setting of a paper."""
    strong, weak = Estimate(0.5, 0.4, 0.6, 20), Estimate(-0.5, -0.6, -0.4, 20)
    rows = [judged(EARLY, strong) | {"model": "BERT-base"}, judged(EARLY, weak) | {"model": "m"}]
    rows += [
        judged(MIDDLE, weak) | {"model": "m"},
        judged(OWN, Estimate(0.8, 0.7, 0.9, 20)) | {"model": "m"},
    ]
    found = ledger({"outliers/attention": page(tmp_path / "a" / "a.ipynb", rows)})
    scopes = found[found["verdict"] != NOT_RUN].set_index("id")["scope"]
    assert scopes[EARLY].tolist() == ["paper", "elsewhere"]
    assert scopes[[MIDDLE, OWN]].tolist() == ["elsewhere", "ours"]
    own = outcomes(found).set_index("id")
    assert own.loc[[EARLY, MIDDLE, OWN], "outcome"].tolist() == [HOLDS, NOT_RUN, HOLDS]
    assert own.loc[OWN, "paper"] == claims.PAPERS["causes"]
    others = outcomes(found, elsewhere=True).set_index("id")["outcome"]
    assert others[[EARLY, MIDDLE]].tolist() == [FAILS, FAILS]
    assert OWN not in others.index
    # In two columns, and with what the paper's own needs where it is not there.
    lines = {name: Ledger._line(None, part) for name, part in found.groupby("id")}
    chips = [
        re.sub(r"<[^>]+>", "", part) for part in lines[EARLY].split('<span class="scope ')[1:3]
    ]
    assert chips[0].startswith('paper">')
    assert chips[0].endswith("BERT-base: holds")
    assert chips[1].startswith('elsewhere">')
    assert "m: does not hold" in chips[1]
    assert "not run: needs BERT-base" in lines[MIDDLE]
    assert 'class="scope ours"' in lines[OWN]
    assert "needs" not in lines[OWN]


def test_the_models_of_a_claim_are_corrected_apart_from_others(tmp_path):
    """p = 0.03 holds alone on the paper's model, however many others there are."""
    weak = Estimate(0.01, 0.001, 0.019, 20)
    rows = [judged(EARLY, weak) | {"model": name} for name in ("BERT-base", "m", "n")]
    found = ledger({"a": page(tmp_path / "a" / "a.ipynb", rows)}).set_index("id")
    assert found.loc[EARLY, "after"].tolist() == [HOLDS, UNDECIDED, UNDECIDED]


def test_the_counts_say_how_many_claims_would_hold_by_chance(executed, monkeypatch):
    assert by_chance(40) == pytest.approx(1)
    counts = Counts.__new__(Counts)
    monkeypatch.setattr("ledger.gathered", lambda _: ledger(executed))
    monkeypatch.setattr(Counts, "env", None, raising=False)
    monkeypatch.setattr(Counts, "parse_text_to_nodes", lambda _, text: text)
    tables = {}
    for argument in ("", "elsewhere"):
        counts.arguments = [argument] * bool(argument)
        heads, _, *lines = [line.strip("| ").split(" | ") for line in counts.run().splitlines()]
        tables[argument] = {line[0]: dict(zip(heads, line, strict=True)) for line in lines}
    # After Li et al., all predictions are the book's own.
    assert list(tables[""]) == [name for paper, name in claims.PAPERS.items() if paper != "li"]
    every = {name: len(claims.load(name)) for name in ("maruta",)}
    ours = sum(claim.ours for claim in claims.load("maruta").values())
    maruta = tables[""][claims.PAPERS["maruta"]]
    assert maruta[NOT_RUN] == str(every["maruta"] - ours)
    assert maruta["by chance"] == "≤ 0.0"
    # Of MiniLM and MPNet: one holds, and one is undecided after correction.
    elsewhere = tables["elsewhere"][claims.PAPERS["maruta"]]
    assert [elsewhere[HOLDS], elsewhere[UNDECIDED]] == ["1", "1"]
    assert elsewhere["by chance"] == "≤ 0.1"
    assert claims.PAPERS["causes"] not in tables["elsewhere"]
