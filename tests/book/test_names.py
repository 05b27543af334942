"""A report in which every name holds harmless markup, in a folder whose path must not leave this
machine.
"""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import jsonschema
import nbformat
import pandas as pd
import pytest
import tiny
import torch
from huggingface_hub import ModelCard

from analysis_book.build.front_page import changes, unusual
from analysis_book.build.reports import build_index, build_report
from analysis_book.papers.geometry import as_table, beside_references

ROOT = Path(__file__).resolve().parents[2]
# In the path of all that the report is made of.
USER = "jane-roe-of-example"
# Each of them would change the title of a page.
RUNS = "<img src=x onerror=document.title=7>"
MODELS = [f"b {{{{x}}}} {RUNS}", "<x-planted> #1?%41`|[a](b)\n*c* {ref}`d`"]
COLUMN = "<script>document.title=7</script> `text` | {{y}}"
TITLE = f"A report's <x-planted> {{{{z}}}} --- `e` *f* {RUNS}"
FOLDER = "javascript:document.title=7#1?%41"
# The tokenizers know no letter of most of these.
TEXTS = ["注意 鍵 問 生 girl", "鍵 問 cone 注意", "a full stop. 鍵", "keys 問 生"] * 4


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """The folder of a report on two models that read a column of a table, none of which has a plain
    name.
    """
    home = tmp_path_factory.mktemp(USER) / "a <x-planted>"
    out = home / "reports" / FOLDER
    out.parent.mkdir(parents=True)
    for name in MODELS:
        model, tokenizer = tiny.build("bert")
        if name == MODELS[1]:
            with torch.no_grad():
                for weight in model.parameters():
                    weight += 0.05 * torch.randn(
                        weight.shape, generator=torch.Generator().manual_seed(0)
                    )
        model.save_pretrained(home / name)
        tokenizer.save_pretrained(home / name)
    table = home / "x<x-planted>{{t}}.csv"
    pd.DataFrame({COLUMN: TEXTS, "number": range(len(TEXTS)), "kind": "a"}).to_csv(
        table, index=False
    )
    build_report(
        [str(home / name) for name in MODELS], f"{table}:{COLUMN}", out, title=TITLE, limit=14
    )
    build_index(out.parent)
    return out


def geometry(report: Path) -> dict:
    return json.loads((report / "geometry.json").read_text(encoding="utf-8"))


def titles(report: Path) -> list[str]:
    return [" ".join(model["title"].split()) for model in geometry(report)["models"]]


def pages(report: Path) -> dict[str, str]:
    found = [path for path in report.rglob("*.html") if "_static" not in path.parts]
    return {path.relative_to(report).as_posix(): path.read_text(encoding="utf-8") for path in found}


class Read(HTMLParser):
    """What a page shows, and what could run on it."""

    def __init__(self, html: str):
        super().__init__()
        self.words, self.tags, self.handlers, self.scripts, self.links = [], set(), [], [], []
        self._inside = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list) -> None:
        given = dict(attributes)
        self.tags.add(tag)
        self.handlers += [value for name, value in attributes if name.startswith("on")]
        self.links += [given["href"]] if "href" in given else []
        if tag in ("script", "style"):
            self._inside = given.get("type") or tag

    def handle_endtag(self, tag: str) -> None:
        if tag in ("script", "style"):
            self._inside = ""

    def handle_data(self, data: str) -> None:
        if not self._inside:
            self.words.append(data)
        elif self._inside == "script":
            self.scripts.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())


@pytest.fixture(scope="module")
def read(built) -> dict[str, Read]:
    return {name: Read(html) for name, html in pages(built).items()}


# --- Text that does not run
# ------------------------------------------------------------------------------------------


def test_no_name_is_markup_on_any_page(built, read):
    index = Read((built.parent / "index.html").read_text(encoding="utf-8"))
    assert len(read) > 12
    for name, page in [*read.items(), ("the index", index)]:
        assert "x-planted" not in page.tags, name
        assert not any("title=7" in code for code in (*page.handlers, *page.scripts)), name
        assert all(urlsplit(link).scheme in ("", "https", "http", "data") for link in page.links), (
            name
        )


def test_names_are_shown_as_they_are(built, read):
    first, second = titles(built)
    column = " ".join(COLUMN.split())
    assert RUNS in first
    assert "`|[a](b) *c* {ref}`d`" in second
    front = read["index.html"].text
    assert front.count(first) > 5
    assert front.count(second) > 5
    assert f"x<x-planted>{{{{t}}}}.csv:{column}" in front
    for page in json.loads((built / "report.json").read_text(encoding="utf-8"))["pages"]:
        text = read[f"report/{page}.html"].text
        assert "How this page was made" in text
        for content in (
            f"model {first}",
            f"model {second}",
            f"data x<x-planted>{{{{t}}}}.csv:{column}",
        ):
            assert content in text, page
    # In tables, in lists to choose from and in verdicts.
    for page in ("interventions", "among", "explorer", "claims"):
        assert read[f"report/{page}.html"].text.count(first) > 2, page
    status = read["status.html"].text
    assert "x<x-planted>{{t}}.csv" in status


def test_the_title_of_a_report_is_text(built, read):
    # The theme writes titles as they are in some places, so that a tag is written with other
    # brackets.
    assert TITLE.replace("<", "‹").replace(">", "›") in read["index.html"].text
    assert geometry(built)["title"] == TITLE


def test_the_index_leads_to_the_report(built):
    index = built.parent / "index.html"
    page = Read(index.read_text(encoding="utf-8"))
    (link,) = page.links
    assert not urlsplit(link).query
    assert not urlsplit(link).fragment
    assert (index.parent / unquote(link)).samefile(built / "index.html")
    assert TITLE in page.text


def test_nothing_runs_in_a_browser(built, browser):
    seen = {}
    with browser.new_context() as context:
        page = context.new_page()
        for path in [built.parent / "index.html", *(built / name for name in pages(built))]:
            page.goto(path.as_uri(), wait_until="load")
            seen[path.name] = page.title()
        assert "7" not in {*seen.values()}
        page.goto((built.parent / "index.html").as_uri())
        page.click("td a")
        assert "What is unusual" in page.inner_text("main")
        assert page.title() != "7"


def test_a_model_card_and_its_metadata_hold_names_as_text(built):
    card = ModelCard.load(built / "model-card.md")
    first, second = titles(built)
    (result, *_) = card.data.eval_results
    assert card.data.model_name == geometry(built)["models"][0]["title"]
    assert result.dataset_name == f"x<x-planted>{{{{t}}}}.csv:{COLUMN}"
    headings = re.findall("^### (.*)$", card.text, re.MULTILINE)
    assert [re.sub(r"\\(.)", r"\1", heading) for heading in headings] == [first, second]


# --- What does not leave this machine
# --------------------------------------------------------------------------------


def test_no_file_of_a_report_has_the_path_of_what_it_is_made_of(built):
    files = [path for path in built.rglob("*") if path.is_file()]
    assert len(files) > 100
    holding = [path.relative_to(built) for path in files if USER.encode() in path.read_bytes()]
    assert not holding
    assert USER not in (built.parent / "index.html").read_text(encoding="utf-8")


def test_notebooks_name_models_and_data_without_their_folders(built):
    notebook = nbformat.read(built / "_sources" / "report" / "drift.ipynb", 4)
    (cell,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ()))
    values: dict = {}
    exec(cell.source, values)
    assert values["models"] == MODELS
    assert values["data"] == f"x<x-planted>{{{{t}}}}.csv:{COLUMN}"
    found = geometry(built)
    assert [model["name"] for model in found["models"]] == MODELS
    assert {model["data"] for model in found["models"]} == {values["data"]}


# --- Notes
# -----------------------------------------------------------------------------------------------------------


def test_notes_name_each_model_wherever_its_numbers_are(built, read):
    note = "of the tokens, so that its numbers say little of these texts"
    described = json.loads((built / "report.json").read_text(encoding="utf-8"))
    for models in (geometry(built)["models"], described["models"]):
        assert [any(note in words for words in model["notes"]) for model in models] == [True, True]
    front = read["index.html"].text
    card = re.sub(r"\\(.)", r"\1", (built / "model-card.md").read_text(encoding="utf-8"))
    index = Read((built.parent / "index.html").read_text(encoding="utf-8")).text
    for text in (front, card, index):
        assert text.count(note) == 2
    unknown = geometry(built)["models"][0]["notes"][0]
    assert all(f"{name}: {unknown}" in front for name in titles(built))
    # What is measured on a page is noted there, too.
    drift = read["report/drift.html"].text
    assert drift.count(note) == 2


# --- What is unusual
# -------------------------------------------------------------------------------------------------


def test_the_first_page_says_what_is_unusual_and_what_changed(built, read):
    found = geometry(built)
    jsonschema.validate(
        found, json.loads((ROOT / "data" / "geometry.schema.json").read_text(encoding="utf-8"))
    )
    front = read["index.html"].text
    for model in found["models"]:
        rows, beyond = as_table(model), []
        for row in model["beside_references"]:
            values = rows.query("quantity == @row['quantity'] and of == @row['of']")["value"]
            end = values.min() if row["quantity"] == "entropy" else values.max()
            assert row["value"] == pytest.approx(end)
            beyond.append(row["side"] != "within")
            number = f"{row['value']:.2f} [{row['ci_low']:.2f}, {row['ci_high']:.2f}] (layer {row['layer']})"
            assert (number in front) == beyond[-1]
        # Where nothing is unusual, all that was looked at is listed.
        assert any(beyond)
    text = front.partition("What changed most#")[2].partition("What we found#")[0]
    clear = [
        row
        for row in found["differences"]
        if row["ci_low"] is not None and row["ci_low"] * row["ci_high"] > 0
    ]
    bounded = [
        row for row in clear if row["quantity"] in ("anisotropy", "similarity", "drift", "entropy")
    ]
    largest = max(bounded, key=lambda row: abs(row["difference"]))
    assert (
        f"{largest['difference']:+.3g} [{largest['ci_low']:.3g}, {largest['ci_high']:.3g}]" in text
    )
    assert "Glossary" in front
    assert "anisotropy in at least one of its layers" in front


def test_a_number_is_unusual_where_its_interval_lies_beyond_those_of_the_references():
    rows = pd.DataFrame(
        {"quantity": "anisotropy", "of": "hidden", "layer": [0, 1], "value": [0.1, 0.72]}
    ).assign(ci_low=lambda t: t["value"] - 0.02, ci_high=lambda t: t["value"] + 0.02)
    others = pd.concat(
        [rows.assign(model="A", value=[0.0, 0.15]), rows.assign(model="B", value=[0.64, 0.1])]
    )
    others = others.assign(ci_low=others["value"] - 0.01, ci_high=others["value"] + 0.01)
    (row,) = beside_references(rows, others)
    assert (row["side"], row["layer"], row["reference_low"], row["reference_high"]) == (
        "above",
        1,
        0.15,
        0.64,
    )
    assert row["references"] == ["A", "B"]
    model = {"title": "m_1", "kind": "text", "beside_references": [row]}
    text = unusual([model])
    assert r"- m\_1: " in text
    assert (
        "average cosine of two tokens up to **0.72** [0.70, 0.74] (layer 1); reference models 0.15 "
        "to 0.64" in text
    )
    # Its interval reaches into that of a reference model.
    (inside,) = beside_references(rows.assign(ci_low=0.645), others)
    assert inside["side"] == "within"
    assert "nothing beyond" in unusual([model | {"beside_references": [inside]}])
    (below,) = beside_references(rows.assign(value=0.1, ci_low=0.05, ci_high=0.12), others)
    assert below["side"] == "below"
    assert beside_references(rows, others.iloc[:0]) == []
    assert (
        unusual([model | {"beside_references": []}])
        == "There is no reference model that reads texts."
    )


def test_changes_without_a_clear_sign_are_none():
    layer = {
        "layer": 1,
        "anisotropy": {"hidden": {"value": 0.5}},
        "mean_norm": {"hidden": {"value": 2.0}},
    }
    models = [{"title": "a", "layers": [layer]}, {"title": "b", "layers": [layer]}]
    about = {"model": "b", "compared_with": "a", "of": "hidden", "layer": 1}
    unclear = about | {"quantity": "anisotropy", "difference": 0.3, "ci_low": -0.1, "ci_high": 0.7}
    clear = about | {"quantity": "mean_norm", "difference": -1.0, "ci_low": -1.2, "ci_high": -0.8}
    text = changes({"models": models, "differences": [unclear, clear]})
    assert "1 of 2 differences have an interval without zero" in text
    assert "mean norm, hidden states: **-1** [-1.2, -0.8] in layer 1, from 2" in text
    assert "cosine" not in text
    assert changes({"models": models[:1], "differences": []}) == ""
