"""A report on two models, built once: what it holds, and what keeps the last one. The index, and
bad input.
"""

import errno
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jsonschema
import nbformat
import pandas as pd
import pytest
import tiny
import tokenizers
import torch
import transformers
from planted import run_cells
from planted_notebooks import faults, is_shown_by_jupyter_alone

from analysis_book.build import notebook, reports, site
from analysis_book.build.listing import located
from analysis_book.build.parameters import notebook_parameters, read_notebook
from analysis_book.build.reports import PAGES, build_index, build_report
from analysis_book.papers.geometry import METRICS, headlines
from analysis_lib import AnalysisError, Replace, load_corpus, load_model, measure
from analysis_lib.files import SEAL
from analysis_lib.measurement.comparison import Comparison
from analysis_lib.measurement.measuring import measure_sensible

ROOT = Path(__file__).resolve().parents[2]
TITLE = "A $model_x$, \"quoted\" & 'own' <b>漢字</b> `c` *d*"
every_page = pytest.mark.parametrize("name", PAGES)


@pytest.fixture(scope="module")
def lines(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "lines.txt"
    path.write_text("\n".join(tiny.TEXTS * 2), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def models(tiny_folder, tmp_path_factory) -> list[Path]:
    """A model whose layers share their weights, and another of the same name that moved a little,
    as in fine-tuning.
    """
    first = tiny_folder("albert")
    model, tokenizer = tiny.build("albert")
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.05 * torch.randn_like(weight)
    other = tmp_path_factory.mktemp("tuned $é") / first.name
    model.save_pretrained(other)
    tokenizer.save_pretrained(other)
    return [first, other]


@pytest.fixture(scope="module")
def built(models, lines, tmp_path_factory) -> Path:
    """The folder of a report on both."""
    out = tmp_path_factory.mktemp("reports") / "both"
    build_report([*map(str, models)], str(lines), out, title=TITLE, limit=14)
    return out


def words(page: Path) -> str:
    main = re.search("<main.*</main>", page.read_text(encoding="utf-8"), re.DOTALL)[0]
    return " ".join(re.sub("<[^>]*>", " ", main).split())


def none_is_empty(report: Path) -> None:
    """Each page of a report has a finding, and something to look at."""
    for page in json.loads((report / "report.json").read_text(encoding="utf-8"))["pages"]:
        said = words(report / "report" / f"{page}.html")
        html = (report / "report" / f"{page}.html").read_text(encoding="utf-8")
        assert "Finding" in said
        assert re.search(r'<figure|class="figure"|<table', html)
        assert not re.search(r"\bnan\b|Markdown object|Traceback", said)


def files(folder: Path) -> dict[str, int]:
    return {
        str(p.relative_to(folder)): p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()
    }


# --- What a report holds
# ---------------------------------------------------------------------------------------------


def test_every_page_that_applies_is_there_and_its_finding_on_the_first(built):
    about = json.loads((built / "report.json").read_text(encoding="utf-8"))
    assert set(about["pages"]) >= {*PAGES} - {"training", "dimensions"}
    first = words(built / "index.html")
    for page in about["pages"]:
        notebook = read_notebook(located(Path("report") / page))
        title = notebook.cells[0].source.splitlines()[0].removeprefix("# ")
        assert title in first
        said = words(built / "report" / f"{page}.html")
        if page == "claims":
            assert "not applicable" in said or "holds" in said or "undecided" in said
        assert re.search(r"\d", said.partition("Finding")[2].partition("models :")[0])
    none_is_empty(built)
    assert "AlbertModel" in first
    assert "cosine of the outputs" in words(built / "report" / "interventions.html")
    assert not (built / "report" / "training.html").exists()


def test_a_title_is_shown_as_it_was_given(built):
    page = (built / "index.html").read_text(encoding="utf-8")
    *_, heading = re.findall("<h1>(.*?)(?:<a|</h1>)", page, re.DOTALL)
    for part in ("$model_x$", "&amp;", "‹b›漢字‹/b›", "`c`", "*d*"):
        assert part in heading
    assert '<span class="math' not in heading
    # The theme writes it as it is in other places.
    assert "<b>" not in page.replace("<b>Previous</b>", "")


def test_every_address_in_a_report_is_of_a_file_in_it_wherever_it_lies(built, tmp_path):
    """Zipped, moved and unzipped."""
    packed = shutil.make_archive(str(tmp_path / "packed"), "zip", built)
    shutil.unpack_archive(packed, moved := tmp_path / "elsewhere" / "moved")
    pages = [path for path in moved.rglob("*.html") if "_static" not in path.parts]
    assert len(pages) > 8
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert str(built.parent) not in text
        for address in re.findall(r'(?:href|src)="([^"#?]+)', text):
            if not address.startswith(("data:", "mailto:")):
                assert not re.match(r"(https?:)?//", address) or "<a " in text, address
                if "//" not in address:
                    assert (page.parent / address).exists(), (page, address)
        own = [page, *(page.parent / src for src in re.findall(r'<img[^>]* src="([^":#]+)', text))]
        assert sum(path.stat().st_size for path in own) < 5e6


def test_differences_have_their_figure_on_every_page_of_two_models(built):
    for page in (
        "similarity",
        "within",
        "drift",
        "attention",
        "sinks",
        "spikes",
        "contributions",
        "interventions",
    ):
        assert "What differs" in words(built / "report" / f"{page}.html"), page
    table = pd.read_csv(built / "_static" / "figures" / "fig-similarity-difference.csv")
    assert {"difference", "ci_low", "ci_high"} <= {*table}
    assert (table["ci_low"] < table["difference"]).all()


def test_what_interventions_do_and_the_explorer_are_of_both_models(built):
    titles = {
        model["title"]
        for model in json.loads((built / "report.json").read_text(encoding="utf-8"))["models"]
    }
    table = pd.read_csv(built / "_static" / "figures" / "fig-interventions.csv")
    for title in titles:
        of_model = table[table["model"] == title]
        # A mean key adds the same to all scores of a query; the other changes turn what comes out.
        assert of_model.loc[of_model["arm"] == "mean key", "value"].abs().max() < 1e-6
        assert (of_model.loc[of_model["arm"] == "mean vector", "value"] > 0.01).all()
    page = (built / "report" / "explorer.html").read_text(encoding="utf-8")
    for title in titles:
        assert f"{title}</option>" in page
    assert all(
        len(data) < 300_000
        for data in re.findall('<script class="table".*?</script>', page, re.DOTALL)
    )


def test_norms_differ_by_what_the_tables_say_with_an_interval(built):
    """On the page of spikes: the mean and the median have one, paired over texts; the largest has
    none.
    """
    said = words(built / "report" / "spikes.html").partition("What differs")[2]
    means = pd.read_csv(built / "tables" / "mean_vector_difference.csv").query("space == 'hidden'")
    norms = pd.read_csv(built / "tables" / "token_norms_difference.csv")
    norms = norms.query("token_type == 'all' and position.isna()")
    tables = {"mean": means.query("quantity == 'mean_norm'")}
    tables |= {name: norms.query("quantity == @name") for name in ("median", "largest")}
    for name, table in tables.items():
        row = table.query("layer == 2").iloc[0]
        numbers = (row[column] for column in ("difference", "ci_low", "ci_high"))
        assert " ".join([name, *("–" if pd.isna(n) else f"{n:z.2f}" for n in numbers)]) in said
        assert pd.isna(row["ci_low"]) == (name == "largest")


def test_models_of_one_name_are_told_apart_without_their_whole_paths(built, models):
    about = json.loads((built / "report.json").read_text(encoding="utf-8"))
    titles = [model["title"] for model in about["models"]]
    assert len({*titles}) == 2
    assert not any(title.startswith("/") or "$" in title for title in titles)


def test_the_json_is_that_of_its_schema_and_of_the_tables(built):
    schema = json.loads((ROOT / "data" / "geometry.schema.json").read_text(encoding="utf-8"))
    found = json.loads((built / "geometry.json").read_text(encoding="utf-8"))
    jsonschema.validate(found, schema)
    assert found["title"] == TITLE
    table = pd.read_csv(built / "tables" / "anisotropy.csv")
    for model in found["models"]:
        rows = table[(table["model"] == model["title"]) & (table["layer"] == 2)]
        for space, row in model["layers"][2]["anisotropy"].items():
            assert row["value"] == pytest.approx(
                rows.loc[rows["space"] == space, "cosine"].mean(), rel=1e-4
            )
    # Of spaces without heads, the paired difference is that of the tables.
    wanted = pd.read_csv(built / "tables" / "anisotropy_difference.csv").query("space == 'hidden'")
    rows = [
        row
        for row in found["differences"]
        if (row["quantity"], row["of"]) == ("anisotropy", "hidden")
    ]
    for row, other in zip(rows, wanted.itertuples(), strict=True):
        assert [row[name] for name in ("difference", "ci_low", "ci_high")] == pytest.approx(
            [other.difference, other.ci_low, other.ci_high], rel=1e-3, abs=1e-6
        )


def test_the_model_card_is_one(built):
    from huggingface_hub import ModelCard

    card = ModelCard.load(built / "model-card.md")
    (result, *_) = card.data.eval_results
    assert result.dataset_name == "lines.txt"
    assert "## Geometry of self-attention" in card.text
    found = json.loads((built / "geometry.json").read_text(encoding="utf-8"))
    highest = max(layer["anisotropy"]["hidden"]["value"] for layer in found["models"][0]["layers"])
    assert result.metric_value == pytest.approx(highest)


# --- What keeps the last good one
# ------------------------------------------------------------------------------------


def test_a_failed_report_leaves_the_last_one_as_it_was(built, models, lines, monkeypatch):
    before = files(built)

    def fail(*_: object, **__: object) -> None:
        raise AnalysisError("the site was not built")

    monkeypatch.setattr(reports, "build_book", fail)
    with pytest.raises(AnalysisError, match="was not built"):
        build_report([*map(str, models)], str(lines), built)
    assert files(built) == before
    assert [path.name for path in built.parent.iterdir()] == [built.name]
    assert {path.name for path in built.glob(".*")} == {SEAL, ".buildinfo", ".key"}


def test_units_tokenizer_device_and_workers_are_those_of_all_that_is_measured(
    tiny_folder, tmp_path, monkeypatch
):
    """Of the pages too, which find the measurements by them."""
    folder, data, seen, given = tiny_folder("bert"), tmp_path / "texts.csv", [], {}
    rows = [f"{text.replace(',', '')},{number % 3}" for number, text in enumerate(tiny.TEXTS * 2)]
    data.write_text("\n".join(["text,document", *rows]), encoding="utf-8")

    def loaded(name: str, **read_as: object) -> object:
        seen.append(read_as)
        return load_model(name, **read_as)

    def measured(model: object, corpus: object, names: object, **work: object) -> object:
        seen.append(work)
        return measure_sensible(model, corpus, names, **work)

    def note(_profile: str, parameters: dict, root: Path, out: Path) -> None:
        given.update(parameters)
        out.mkdir()

    monkeypatch.setattr(reports, "load_model", loaded)
    monkeypatch.setattr(reports, "measure_sensible", measured)
    monkeypatch.setattr(reports, "build_book", note)
    asked = {"units": "document", "tokenizer": str(folder), "device": "cpu"}
    build_report([str(folder)], f"{data}:text", tmp_path / "out", workers=2, **asked)
    assert seen == [{"processor": str(folder), "device": "cpu"}, {"workers": 2}]
    assert given["options"] == asked
    # On a page, they are what is compared with.
    kept = tmp_path / "kept"
    monkeypatch.setenv("ANALYSIS_LIB_MEASUREMENTS", str(kept))
    names = {
        "models": [str(folder)],
        "data": f"{data}:text",
        "limit": 1500,
        "seed": 0,
        "options": asked,
    }
    found = run_cells(str(reports.HOME / "similarity"), "comparison = compare(", **names)
    (tables,) = found["comparison"].trained.values()
    few = load_corpus(f"{data}:text", units="document")
    assert tables.run["data_sha256"] == few.sha256
    wanted = measure(load_model(str(folder)), few, "anisotropy", progress=False)["anisotropy"]
    pd.testing.assert_frame_equal(tables["anisotropy"], wanted)
    before = {path: path.stat().st_mtime_ns for path in kept.rglob("*.npz")}
    run_cells(str(reports.HOME / "similarity"), "comparison = compare(", **names)
    assert before == {path: path.stat().st_mtime_ns for path in kept.rglob("*.npz")} != {}


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"device": "warp"}, "warp"),
        ({"units": "document"}, "document"),
        ({"workers": 0}, "workers is 0"),
    ],
)
def test_a_report_refuses_a_bad_option_before_it_loads_a_model(
    asked, words, models, lines, tmp_path, monkeypatch
):
    monkeypatch.setattr(reports, "load_model", lambda *_, **__: pytest.fail("a model was loaded"))
    with pytest.raises(AnalysisError, match=words):
        build_report([str(models[0])], str(lines), tmp_path / "out", **asked)


@pytest.mark.parametrize(
    ("version", "words"),
    [("2.1.7", "2.1.7 is installed"), ("10.0", "10.0 is installed"), (None, "none is installed")],
)
def test_without_jupyter_book_1_nothing_is_measured(
    version, words, models, lines, tmp_path, monkeypatch
):
    def installed(name: str) -> str:
        assert name == "jupyter-book"
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(site.importlib.metadata, "version", installed)
    monkeypatch.setattr(reports, "load_model", lambda *_: pytest.fail("a model was loaded"))
    with pytest.raises(AnalysisError, match=words) as caught:
        build_report([str(models[0])], str(lines), tmp_path / "out")
    (line,) = caught.value.args
    assert "pip install 'jupyter-book<2'" in line
    assert not [*tmp_path.iterdir()]


def test_a_log_that_is_named_is_there_to_be_read(models, lines, tmp_path, monkeypatch):
    """Of a site with a warning: the folder in which it was built has gone."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(reports, "PAGES", {"drift": PAGES["drift"]})
    monkeypatch.setattr(notebook, "_run", not_run)
    monkeypatch.setattr(reports, "FIRST", reports.FIRST + "\n{{ref}}`nowhere`\n")
    with pytest.raises(AnalysisError, match="nowhere") as caught:
        build_report([str(models[0])], str(lines), tmp_path / "out", limit=6)
    log = Path(re.search(r"full log: (.*)\)", str(caught.value))[1])
    assert log.parent == tmp_path
    assert "nowhere" in log.read_text(encoding="utf-8")
    assert ".report-" not in str(caught.value)


def test_a_notebook_that_fails_is_named_as_a_page(models, lines, tmp_path, monkeypatch):
    monkeypatch.setattr(reports, "PAGES", {"drift": PAGES["drift"]})

    async def failed(copy: nbformat.NotebookNode, *_: object) -> tuple:
        return copy.cells[1], RuntimeError("no more"), 0.0

    monkeypatch.setattr(notebook, "_run", failed)
    with pytest.raises(AnalysisError, match=r"^book/report/drift\.ipynb failed"):
        build_report([str(models[0])], str(lines), tmp_path / "out", limit=6)


KILLED = """
import os, sys
from analysis_book.build import notebook, reports
reports.build_book = lambda *a, **k: os.kill(os.getpid(), 9)
reports.build_report(sys.argv[1:3], *sys.argv[3:])
"""


def test_a_killed_report_leaves_the_last_one_and_the_next_clears_up(
    built, models, lines, monkeypatch
):
    before = files(built)
    command = [sys.executable, "-c", KILLED, *models, lines, built]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == -9
    assert files(built).items() >= before.items()
    assert [*built.glob(".report-*")]
    monkeypatch.setattr(reports, "build_book", None)
    with pytest.raises(TypeError):
        build_report([*map(str, models)], str(lines), built)
    assert files(built) == before


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("place", ["the pages", "a notebook", "the tables"])
def test_a_full_disk_is_one_line_and_leaves_the_last_report(
    place, built, models, lines, monkeypatch
):
    before = files(built)
    if place == "the pages":
        monkeypatch.setattr(shutil, "copy", full)
    elif place == "a notebook":
        # Of all notebooks that are executed, the same.
        monkeypatch.setattr(notebook, "_write", full)
        monkeypatch.setattr(reports, "PAGES", {"drift": PAGES["drift"], "sinks": PAGES["sinks"]})
        monkeypatch.setattr(notebook, "_run", not_run)
    else:
        monkeypatch.setattr(reports, "build_book", lambda *_, out, **__: out.mkdir())
        monkeypatch.setattr(pd.DataFrame, "to_csv", full)
    with pytest.raises(AnalysisError, match=r"No space left on device.*free some space") as caught:
        build_report([*map(str, models)], str(lines), built, limit=6)
    assert len(caught.value.args) == 1
    assert "\n" not in str(caught.value)
    assert files(built) == before
    assert [path.name for path in built.parent.iterdir()] == [built.name]


async def not_run(copy: nbformat.NotebookNode, *_: object) -> tuple[None, None, float]:
    """A notebook whose cells count as executed."""
    for number, cell in enumerate(cell for cell in copy.cells if cell.cell_type == "code"):
        cell.execution_count = number + 1
    return None, None, 0.0


def test_a_folder_that_is_no_report_is_left_alone(models, lines, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "src").mkdir()
    with pytest.raises(
        AnalysisError, match=r"holds notes\.txt, which is no part of a report: give another folder"
    ):
        build_report([str(models[0])], str(lines), tmp_path)
    # Other programs have files of this name.
    (tmp_path / "report.json").write_text("{}")
    with pytest.raises(
        AnalysisError, match=r"holds notes\.txt, which is no part of a report: give another folder"
    ):
        build_report([str(models[0])], str(lines), tmp_path)
    with pytest.raises(AnalysisError, match=r"cannot be written \(it is a file\)"):
        build_report([str(models[0])], str(lines), tmp_path / "notes.txt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "report.json", "src"]


@pytest.fixture
def quick_site(monkeypatch) -> list[str]:
    """A site whose pages are these, without notebooks and Sphinx."""
    pages = ["index.html", "report/drift.html"]

    def site(*_: object, out: Path, **__: object) -> None:
        for page in pages:
            (out / page).parent.mkdir(parents=True, exist_ok=True)
            (out / page).write_text(f"<p>{page}", encoding="utf-8")

    monkeypatch.setattr(reports, "build_book", site)
    return pages


def test_what_a_user_puts_into_a_report_stays_when_it_is_made_again(
    quick_site, models, lines, tmp_path
):
    given, out = ([str(models[0])], str(lines)), tmp_path / "out"
    (tmp_path / "elsewhere").mkdir()
    out.symlink_to(tmp_path / "elsewhere")
    build_report(*given, out, limit=6)
    for name in ("notes.txt", "report/mine.html", ".git/config"):
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text("mine")
    quick_site.remove("report/drift.html")
    build_report(*given, out, limit=6, title="Anew")
    assert out.is_symlink()
    for name in ("notes.txt", "report/mine.html", ".git/config"):
        assert (out / name).read_text() == "mine"
    assert not (out / "report" / "drift.html").exists()
    assert json.loads((out / "report.json").read_text(encoding="utf-8"))["title"] == "Anew"
    assert str(tmp_path) not in (out / SEAL).read_text(encoding="utf-8")
    before = files(out)
    for other in (
        ([str(models[1])], str(lines)),
        ([*map(str, models)], str(lines)),
        ([str(models[0])], "news"),
    ):
        with pytest.raises(
            AnalysisError, match=r"holds what analysis-lib report wrote of .*: give another folder"
        ):
            build_report(*other, out)
    (out / "index.html").write_text("<p>my words")
    with pytest.raises(
        AnalysisError, match=r"index\.html has been changed since analysis-lib wrote it: move it"
    ):
        build_report(*given, out)
    assert (out / "index.html").read_text() == "<p>my words"
    assert files(out).keys() == before.keys()


def test_a_report_of_another_precision_replaces_the_last_one(quick_site, models, lines, tmp_path):
    for dtype in ("", "@dtype=float64"):
        build_report([f"{models[0]}{dtype}"], str(lines), tmp_path / "out", limit=6)
    (model,) = json.loads((tmp_path / "out" / "geometry.json").read_text(encoding="utf-8"))[
        "models"
    ]
    assert model["dtype"] == "float64"


@pytest.mark.parametrize(
    ("given", "data", "message"),
    [
        (["bert", "bert"], "lines", "given twice"),
        (["bert", "bert/"], "lines", "given twice"),
        (["bert"], "-", "instead of standard input"),
        (["bert"], "photographs", "reads texts"),
        (["nowhere/at-all"], "lines", "nowhere/at-all"),
    ],
)
def test_what_cannot_be_reported_is_refused_in_one_line(
    given, data, message, models, lines, tmp_path, monkeypatch
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    given = [name.replace("bert", str(models[0])) for name in given]
    with pytest.raises(AnalysisError, match=message):
        build_report(given, str(lines) if data == "lines" else data, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- Which pages apply
# -----------------------------------------------------------------------------------------------


def staged(name: str, folder: Path, tmp_path: Path, is_run: bool = False) -> tuple[list[str], dict]:
    """The pages of a report on a model, and what geometry.json holds."""
    loaded = load_model(name)
    data = {"text": [*tiny.TEXTS], "image": "digits", "audio": "speech-clips"}[loaded.kind]
    tables = measure_sensible(loaded, load_corpus(data, 8, None), METRICS, progress=False)
    comparison = Comparison({(name, None): tables})
    found = reports._geometry("T", comparison, {name: reports._about(loaded)})
    return reports._stage(tmp_path / "root", found, comparison, [], is_run), found


@pytest.mark.parametrize(
    ("architecture", "without", "with_"),
    [
        (
            "gpt2",
            {"training"},
            {"attention", "sinks", "contributions", "spikes", "interventions", "explorer"},
        ),
        (
            "resnet-basic",
            {"attention", "sinks", "contributions", "within", "interventions", "explorer"},
            {"similarity", "drift", "among"},
        ),
        (
            "vit",
            {"training"},
            {"attention", "sinks", "within", "among", "interventions", "explorer"},
        ),
        ("segformer", {"training"}, {"attention", "explorer", "interventions"}),
        ("cvt", {"training"}, {"attention", "interventions"}),
        ("wav2vec2", {"training"}, {"attention", "sinks", "within", "interventions"}),
        ("t5", {"training"}, {"attention", "sinks", "within", "interventions"}),
    ],
)
def test_pages_that_do_not_apply_are_left_out(architecture, without, with_, tiny_folder, tmp_path):
    pages, found = staged(str(tiny_folder(architecture)), tmp_path, tmp_path)
    assert not without & {*pages}
    assert with_ <= {*pages}
    schema = json.loads((ROOT / "data" / "geometry.schema.json").read_text(encoding="utf-8"))
    jsonschema.validate(json.loads(json.dumps(found, allow_nan=False)), schema)
    # One model: nothing about differences is left in its notebooks.
    for page in pages:
        text = (tmp_path / "root" / "book" / "report" / f"{page}.ipynb").read_text(encoding="utf-8")
        assert "What differs" not in text
        assert "headline_differences(" not in text or page == "training"


def test_the_claims_can_be_asked_of_an_encoder_with_a_decoder(tiny_folder):
    """Whose attention to the encoder is a layer without hidden states."""
    from analysis_book.papers.godey.anisotropy import cosines, isotropic_excess

    tables = measure_sensible(
        load_model(str(tiny_folder("t5"))), load_corpus([*tiny.TEXTS]), ["anisotropy"], False
    )
    assert tables.layers["width"].isna().any()
    excess = isotropic_excess(tables)
    assert [*excess.index] == [*cosines(tables).index]
    assert excess.notna().all()


# --- Models that nobody here has
# -------------------------------------------------------------------------------------


SMILES = [
    "CC(=O)OC1=CC=CC=C1C(=O)O",
    "CN1C=NC2=C1C(=O)N(C(=O)N2C)C",
    "CCO",
    "C1=CC=CC=C1",
    "CC(C)CC1=CC=C(C=C1)C(C)C(=O)O",
]


def chemist(folder: Path) -> None:
    """A masked language model of molecules, with a tokenizer made up for their atoms and bonds."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {token: number for number, token in enumerate([*special, *"CNO=()123456Sn[]+-Hc"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    ends = [(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")]
    made.post_processor = tokenizers.processors.TemplateProcessing(
        "[CLS] $A [SEP]", special_tokens=ends
    )
    names = dict(
        zip(
            ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), special, strict=True
        )
    )
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names).save_pretrained(folder)
    size = {
        "hidden_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    transformers.BertForMaskedLM(
        transformers.BertConfig(vocab_size=len(vocabulary), **size)
    ).save_pretrained(folder)


def test_a_report_on_an_unseen_model_has_every_page_and_none_is_empty(tmp_path):
    data, folder, out = tmp_path / "data.txt", tmp_path / "my model", tmp_path / "out"
    data.write_text("\n".join(SMILES * 3), encoding="utf-8")
    torch.manual_seed(0)
    chemist(folder)
    build_report([str(folder)], str(data), out)
    about = json.loads((out / "report.json").read_text(encoding="utf-8"))
    # Of random weights, no dimension may stand out.
    assert {*about["pages"]} >= {*PAGES} - {"training", "dimensions", "representations"}
    none_is_empty(out)
    first = words(out / "index.html")
    assert "BertModel" in first
    assert "my model" in first
    assert "loss of masked tokens" in words(out / "report" / "interventions.html")


# --- Runs of training
# ------------------------------------------------------------------------------------------------


def test_a_run_shows_its_first_and_last_checkpoint_and_all_along_training(
    models, lines, tmp_path, monkeypatch
):
    run = tmp_path / "run"
    for step, model in zip((500, 5000, 10000), (*models, models[0]), strict=True):
        shutil.copytree(model, run / f"checkpoint-{step}")
    # The last one must differ in its weights, or it is left out.
    model, _ = tiny.build("albert", seed=3)
    model.save_pretrained(run / "checkpoint-10000")
    seen = {}

    def note(_profile: str, parameters: dict, root: Path, out: Path) -> None:
        seen.update(
            parameters=parameters,
            pages=[path.stem for path in (root / "book" / "report").glob("*.ipynb")],
        )
        out.mkdir()

    monkeypatch.setattr(reports, "build_book", note)
    build_report([str(run)], str(lines), tmp_path / "out", limit=6)
    assert seen["parameters"]["models"] == [
        str(run / "checkpoint-500"),
        str(run / "checkpoint-10000"),
    ]
    assert seen["parameters"]["run"] == str(run)
    assert "training" in seen["pages"]
    table = pd.read_csv(tmp_path / "out" / "tables" / "training.csv")
    assert [*dict.fromkeys(table["model"])] == [
        "checkpoint-500",
        "checkpoint-5000",
        "checkpoint-10000",
    ]


# --- The index
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
#
# -------------------------------------------------------------------------------------------------------


def fake(folder: Path, name: str, title: str) -> None:
    (folder / name).mkdir(parents=True)
    numbers = {"highest average cosine": 0.5, "lowest entropy": None}
    model = {"name": name, "title": title, "model_revision": "r", "headlines": numbers}
    about = {
        "version": 1,
        "title": title,
        "data": "some/lines.txt",
        "texts": 1500,
        "models": [model, model],
    }
    (folder / name / "report.json").write_text(json.dumps(about), encoding="utf-8")


def test_an_index_of_200_reports_is_made_of_their_descriptions_in_a_second(tmp_path):
    for number in range(200):
        fake(tmp_path, f"r{number}", f"Model {number} <b>")
    started = time.monotonic()
    page = build_index(tmp_path).read_text(encoding="utf-8")
    assert time.monotonic() - started < 1
    assert page.count("/index.html") == 200
    assert '<a href="r7/index.html">Model 7 &lt;b&gt;</a>' in page
    assert "1,500 of lines.txt" in page
    assert "some/" not in page


def test_a_new_report_enters_the_index_beside_it(built, models, lines, monkeypatch):
    folder = built.parent
    build_index(folder)
    monkeypatch.setattr(reports, "build_book", lambda *_, out, **__: out.mkdir())
    build_report([str(models[0])], str(lines), folder / "second", title="Second", limit=6)
    text = (folder / "index.html").read_text(encoding="utf-8")
    assert "second/index.html" in text
    assert "both/index.html" in text
    # Two reports share no figure.
    shutil.rmtree(folder / "second")
    (folder / "index.html").unlink()


def test_what_is_no_folder_of_reports_is_refused(tmp_path):
    with pytest.raises(AnalysisError, match="holds no reports"):
        build_index(tmp_path)
    fake(tmp_path, "one", "One")
    (tmp_path / "index.html").write_text("my own page")
    with pytest.raises(AnalysisError, match="no index of reports"):
        build_index(tmp_path)
    assert (tmp_path / "index.html").read_text() == "my own page"
    (tmp_path / "index.html").unlink()
    (tmp_path / "one" / "report.json").write_text("{}")
    with pytest.raises(AnalysisError, match="holds no reports"):
        build_index(tmp_path)


def test_an_index_of_ones_own_or_one_that_was_changed_is_not_replaced(tmp_path):
    """Whatever it mentions."""
    fake(tmp_path, "one", "One")
    page = tmp_path / "index.html"
    mine = f'<meta name="generator" content="{reports.INDEX}"><!-- {reports.INDEX} 0123 -->\n'
    for text in (
        mine,
        build_index(tmp_path).read_text(encoding="utf-8").replace("Reports", "My reports"),
    ):
        page.unlink(missing_ok=True)
        page.write_text(text, encoding="utf-8")
        with pytest.raises(AnalysisError, match="is no index of reports: move it"):
            build_index(tmp_path)
        assert page.read_text(encoding="utf-8") == text
        page.unlink()
    page.symlink_to(tmp_path / "nowhere")
    with pytest.raises(AnalysisError, match="is no index of reports: move it"):
        build_index(tmp_path)
    assert page.is_symlink()


def damaged(**changes: object) -> str:
    """A description of a report with other entries."""
    model = {"title": "M", "headlines": {"cosine": 0.5}}
    return json.dumps({"title": "T", "data": "d", "texts": 3, "models": [model]} | changes)


DAMAGED = {
    "empty": "",
    "cut short": damaged()[:-5],
    "brackets": "[" * 100_000,
    "no text": "\0\udcff",
    "a list": "[1]",
    "of another program": '{"passed": 12, "failed": 0}',
    "title": damaged(title=3),
    "data": damaged(data=None),
    "texts": damaged(texts="many"),
    "models": damaged(models=5),
    "no models": damaged(models=[]),
    "model": damaged(models=["minilm"]),
    "title of a model": damaged(models=[{"title": [], "headlines": {}}]),
    "headlines": damaged(models=[{"title": "M", "headlines": [1]}]),
    "headline": damaged(models=[{"title": "M", "headlines": {"cosine": "0.5"}}]),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_neighbour_is_left_out_with_a_note(damage, tmp_path, caplog):
    fake(tmp_path, "one", "One")
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "report.json").write_text(
        DAMAGED[damage], encoding="utf-8", errors="surrogateescape"
    )
    text = build_index(tmp_path).read_text(encoding="utf-8")
    assert "1 in this folder" in text
    assert "one/index.html" in text
    (note,) = caplog.messages
    assert note.startswith("note: a report is left out of the index: ")
    assert "two/report.json" in note
    assert "\n" not in note


def test_a_report_is_finished_whatever_is_wrong_beside_it(
    quick_site, models, lines, tmp_path, caplog
):
    fake(tmp_path, "one", "One")
    build_index(tmp_path)
    for number, (_, content) in enumerate(DAMAGED.items()):
        (tmp_path / f"damaged-{number}").mkdir()
        path = tmp_path / f"damaged-{number}" / "report.json"
        path.write_text(content, encoding="utf-8", errors="surrogateescape")
    (tmp_path / "folder" / "report.json").mkdir(parents=True)
    page = build_report([str(models[0])], str(lines), tmp_path / "new", limit=6)
    assert page.is_file()
    text = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "2 in this folder" in text
    assert "new/index.html" in text
    assert (
        sum("left out of the index" in message for message in caplog.messages) == len(DAMAGED) + 1
    )


# --- The notebooks
# ---------------------------------------------------------------------------------------------------


@every_page
def test_a_page_is_written_as_the_pages_of_the_book_are(name, tmp_path):
    notebook = read_notebook(located(Path("report") / name))
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert notebook.cells[0].source.startswith("# ")
    assert {*notebook_parameters(reports.HOME / f"{name}.ipynb")} <= {
        "models",
        "run",
        "data",
        "limit",
        "seed",
        "sample",
        "options",
    }
    assert code[-1].metadata["tags"] == ["hide-input", "found"]
    for cell in code:
        assert not cell.outputs
        assert cell.execution_count is None
        assert not is_shown_by_jupyter_alone(cell.source), cell.source
        assert "from IPython.display import Markdown" not in cell.source
    (tmp_path / "notebook.py").write_text("\n".join(cell.source for cell in code))
    assert not faults(tmp_path, "F821")


def test_every_model_has_its_outlier_in_the_finding_in_the_order_of_the_models():
    """Also one whose outliers lie below the twelve that the table shows."""
    rows = [{"model": "first", "dimension": 7, "layer": layer, "zscore": 4.0} for layer in (2, 3)]
    rows += [{"model": "second", "dimension": d, "layer": 2, "zscore": 30.0 - d} for d in range(15)]
    said = []
    names = {"outliers": pd.DataFrame(rows), "display": said.append, "Markdown": str}
    run_cells(str(reports.HOME / "dimensions"), "groups.agg", "peaks = ", **names)
    wanted = "dimension **7**, an outlier in 2 layers (first); dimension **0**, an outlier in 1 layers (second)."
    assert said[-1] == f"What stands out most: {wanted}"


def test_interventions_in_a_cvt_are_in_the_channels_of_its_middle_layer(tiny_folder):
    """Stages have widths of their own, and the pages before this one may read a map as one
    vector.
    """
    folder, seen = str(tiny_folder("cvt")), []
    names = {"models": [folder], "data": "digits", "limit": 12}
    cells = (
        "comparison = compare(",
        "def arms(",
        "measured = {",
        "effects = pd.concat(",
        "if lost:",
    )
    found = run_cells(str(reports.HOME / "interventions"), *cells, **names)
    model, processor = tiny.build("cvt")
    images = load_corpus("digits", limit=12, seed=0)
    # The second block of the second stage.
    handle = (
        model.encoder.stages[1]
        .layers[1]
        .register_forward_hook(lambda _m, _a, out: seen.append(out[0]))
    )
    for item in images.items:
        with torch.no_grad():
            model(processor(item.load().convert("RGB"), return_tensors="pt")["pixel_values"])
    handle.remove()
    largest = torch.cat(seen).mean(0).abs().topk(3).indices.tolist()
    (tables,) = found["comparison"].trained.values()
    assert [*found["arms"](tables)["largest dimensions"][0].dimensions] == largest
    change = Replace("residual", layers=3, dimensions=largest)
    cosine = measure(folder, images, "output_change", intervention=change, progress=False)[
        "output_change"
    ]["cosine"]
    effects = found["effects"].set_index("arm")["effect"]
    assert {*effects.index} == {"largest dimensions", "random dimensions", "mean vector"}
    assert effects["largest dimensions"] == pytest.approx(1 - cosine.item(), abs=1e-6)
    assert {*found["lost"]} == {"key of first token", "mean query", "mean key"}


def test_figures_have_names_of_their_own():
    named = []
    for name in PAGES:
        notebook = nbformat.read(reports.HOME / f"{name}.ipynb", 4)
        named += [
            cell.metadata["mystnb"]["figure"]["name"]
            for cell in notebook.cells
            if "mystnb" in cell.metadata
        ]
        named += [
            found for cell in notebook.cells for found in re.findall(r'"(tbl-[\w-]+)"', cell.source)
        ]
    assert len(named) == len({*named})


def test_the_page_among_others_has_the_references_of_its_kind_but_itself(tiny_folder):
    from analysis_book.papers.geometry import references

    tables = measure_sensible(
        load_model(str(tiny_folder("bert"))), load_corpus([*tiny.TEXTS]), ["anisotropy"], False
    )
    assert {*references(tables)["model"]} == {"MiniLM", "MPNet", "SmolLM2"} or len(
        {*references(tables)["model"]}
    ) == 3
    own = measure_sensible(load_model("minilm"), load_corpus([*tiny.TEXTS]), ["anisotropy"], False)
    assert len({*references(own)["model"]}) == 2
    rows = references(own)
    assert [*rows.columns] == ["model", *headlines(own).columns]
