"""A book on one model, or on several side by side: ``analysis-lib report MODEL``.

Each model is measured once, in one pass; the pages, notebooks in ``report/``, find the measurements
where they are kept. Beside the pages lie ``geometry.json`` (``data/geometry.schema.json``),
``model-card.md``, the tables as CSV, and ``report.json``, of which alone the index of a folder of
reports is made.

To add a page, put a notebook into ``report/``, and what it needs into ``PAGES``.
"""

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from html import escape
from pathlib import Path

import nbformat
import pandas as pd
import yaml

from analysis_book.build import front_page, listing
from analysis_book.build.parameters import ROOT, read_notebook
from analysis_book.build.sharing import data_name, data_to_share, names_to_share, path_to_share
from analysis_book.build.site import build_book, require_jupyter_book
from analysis_book.figures.markup import address, code, plain
from analysis_book.papers.geometry import (
    METRICS,
    VERSION,
    geometry_of,
    headline_differences,
    headlines,
    references,
)
from analysis_book.training.runs import checkpoints
from analysis_lib import __version__, files, store
from analysis_lib.capture.inputs import Settings
from analysis_lib.corpora.loading import load_corpus
from analysis_lib.errors import BEGINS_ANEW, CONTINUES, AnalysisError
from analysis_lib.files import Output
from analysis_lib.measurement.comparison import Comparison
from analysis_lib.measurement.measuring import measure_sensible, refuse_unavailable
from analysis_lib.measurement.stored import interruption
from analysis_lib.measurement.tables import Tables
from analysis_lib.models import LoadedModel
from analysis_lib.models.loading import checked_options, load_model
from analysis_lib.models.names import ModelName

HOME = Path(__file__).with_name("report")
# The pages in their order, and the tables that each shows: without these of every model, it is left
# out.
PAGES = {
    "training": ("anisotropy", "mean_vector"),
    "similarity": ("anisotropy",),
    "within": ("anisotropy", "utterance_similarity"),
    "drift": ("mean_vector",),
    "attention": ("attention_entropy", "attention_by_token_type"),
    "sinks": ("attention_received",),
    "dimensions": ("outlier_dimensions", "dimension_means"),
    "spikes": ("token_norms", "spike_dimensions", "mean_vector"),
    "contributions": ("score_contributions",),
    "interventions": ("dimension_means", "attention_by_token_type"),
    "explorer": ("anisotropy", "attention_entropy", "attention_by_token_type"),
    "representations": ("anisotropy",),
    "among": ("anisotropy", "mean_vector"),
    "claims": ("anisotropy",),
}
# Of these, a page says that there are none.
MAY_BE_EMPTY = ("spike_dimensions",)
REPORT = "report.json"
GEOMETRY = "geometry.json"
CARD = "model-card.md"
INDEX = "analysis-lib report --index"
# Of a page of the book's site, what a report has no use for.
OF_THE_BOOK = ("sphinxcontrib.bibtex", "ledger", "atlas")
FIRST = """\
# {title}

{notes}

## What is unusual

{unusual}

{changes}
## What we found

```{{findings}} report
```

{glossary}

## What it is

{about}

## For other programs

```{{raw}} html
<ul>
<li><a href="{geometry}">{geometry}</a>: the numbers by layer with their intervals, sinks and spikes</li>
<li><a href="{card}">{card}</a>: a section for a model card</li>
<li>tables: {tables}</li>
</ul>
```
"""  # noqa: E501


def build_report(
    models: Sequence[str],
    data: str,
    out: Path,
    *,
    title: str = "",
    limit: int = 1500,
    seed: int = 0,
    units: str | None = None,
    tokenizer: str | None = None,
    device: str | None = None,
    workers: int = 1,
) -> Path:
    """Measure models on the same texts, and build a site about them.

    Args:
        models: as ``load_model`` takes them; differences are to the first. Or one run, a folder
            with checkpoints, of which the first and the last stand side by side, and all of them on
            a page of their own.
        data: as ``load_corpus`` takes it.
        out: the folder of the site. A report on the same models and data that is there is replaced,
            file by file; whatever else lies in the folder stays.
        title: what the report is called; by default what its models are.
        limit: at most so many texts, drawn with ``seed``.
        units: of a table, the column of what each text is a part of, see ``load_corpus``.
        tokenizer, device: of all models, see ``load_model``.
        workers: processes on this machine that measure.

    Returns:
        The path of the first page.

    Raises:
        AnalysisError: no Jupyter Book 1; a folder that holds something else, or a page that was
            changed; what ``load_model``, ``load_corpus`` and ``measure`` raise; a notebook that
            failed, or a site with a warning. The last report is then left as it was.
    """
    out = Path(os.path.abspath(out))
    output = report_output(models, data, out)
    require_jupyter_book()
    if data == "-":
        raise AnalysisError(
            "the pages of a report read the texts again: give a file instead of standard input"
        )
    _refuse_repeated(models)
    checked_options("float32", device)
    corpus = load_corpus(data, limit, seed, units=units)
    for name in models:
        refuse_unavailable(name, corpus, "all", Settings(), workers)
    steps = _steps(models)
    lasting = store.measurements_directory() is not None
    with _scratch(out) as scratch, _kept(scratch):
        every = {}
        about = {}
        for name in steps or models:
            with interruption(kept=bool(every and lasting)):
                loaded = load_model(name, processor=tokenizer, device=device)
                every[name, None] = measure_sensible(loaded, corpus, METRICS, workers=workers)
            about[name] = _about(loaded)
            del loaded
        shown = list(models)
        run = None
        if steps:
            # The first checkpoint and the last.
            shown = [*steps][:: max(1, len(steps) - 1)]
            run = Comparison(every)
        comparison = Comparison({(name, None): every[name, None] for name in shown})
        usual_title = " and ".join(comparison.titles.values())
        if steps:
            usual_title = Path(models[0]).name
        geometry = _geometry(" ".join(title.split()) or usual_title, comparison, about)
        tables = _tables(comparison, run)
        root = scratch / "root"
        pages = _stage(root, geometry, comparison, tables, bool(steps))
        options = {"units": units, "tokenizer": tokenizer, "device": device}
        options = {name: value for name, value in options.items() if value is not None}
        given = {"models": shown, "data": data, "limit": limit, "seed": seed, "options": options}
        if steps:
            given["run"] = models[0]
        site = scratch / "site"
        with _lasting_messages(root, lasting):
            build_book("default", given, root=root, out=site)
        _write(site, geometry, tables, pages)
        output.replace(site)
    if is_index(out.parent / "index.html"):
        try:
            build_index(out.parent)
        except AnalysisError as error:
            # The report is there, whatever is wrong beside it.
            logging.getLogger(__name__).warning(
                "note: the index of reports is left as it was: %s", error
            )
    return out / "index.html"


def _refuse_repeated(models: Sequence[str]) -> None:
    """Refuse a model that is named twice, a folder also by two paths."""
    same = [os.path.realpath(name) if Path(name).is_dir() else name for name in models]
    for name, real in zip(models, same, strict=True):
        if same.count(real) > 1:
            raise AnalysisError(f"{name} was given twice: give each model once")


def report_output(models: Sequence[str], data: str, out: Path) -> Output:
    """The folder of a report.

    Raises:
        AnalysisError: it holds anything that is no report on these models and data.
    """
    names = [ModelName.parse(name).without_dtype for name in models]
    output = Output(out, "report", (*names, data), REPORT)
    if not output.check() and out.is_dir():
        visible = sorted(path.name for path in out.iterdir() if not path.name.startswith("."))
        if visible:
            raise AnalysisError(
                f"{out} holds {visible[0]}, which is no part of a report: give another folder"
            )
    return output


@contextmanager
def _scratch(out: Path) -> Iterator[Path]:
    """A folder to work in, inside that of the report; one that was made for nothing goes again."""
    is_new = not out.exists()
    try:
        with files.writing(out):
            out.mkdir(parents=True, exist_ok=True)
            with files.scratch(out, ".report") as scratch:
                yield scratch
    finally:
        if is_new:
            with suppress(OSError):
                out.rmdir()


def _steps(models: Sequence[str]) -> dict[str, int]:
    """The steps of the checkpoints of a run, by their names, if that is what was given."""
    folder = Path(models[0])
    is_run = any(folder.glob("checkpoint-*")) or (folder / "pretraining.json").is_file()
    if len(models) > 1 or not is_run:
        return {}
    run = checkpoints(models[0])
    if len(run) < 2:
        raise AnalysisError(
            f"{folder} holds the weights of one checkpoint: give {run[0].model} as a model"
        )
    return {checkpoint.model: checkpoint.step for checkpoint in run}


@contextmanager
def _kept(scratch: Path) -> Iterator[None]:
    """Inside it, measurements are kept for the pages, wherever they usually are not."""
    if store.measurements_directory() is not None:
        yield
        return
    os.environ["ANALYSIS_LIB_MEASUREMENTS"] = str(scratch / "measurements")
    try:
        yield
    finally:
        os.environ["ANALYSIS_LIB_MEASUREMENTS"] = ""


@contextmanager
def _lasting_messages(root: Path, measured: bool) -> Iterator[None]:
    """Inside it, messages name no file of the folder, which is cleared; the log is kept elsewhere.

    Args:
        measured: True if measurements are kept, of which a Ctrl-C speaks; the notebooks are not.
    """
    log = root / "_build" / "build.log"
    try:
        yield
    except KeyboardInterrupt:
        message = CONTINUES if measured else BEGINS_ANEW
        raise KeyboardInterrupt(message) from None
    except AnalysisError as error:
        lines = [str(line) for line in error.args]
        if any(str(log) in line for line in lines):
            descriptor, kept = tempfile.mkstemp(suffix=".log", prefix="analysis-lib-report-")
            with open(descriptor, "wb") as file:
                file.write(log.read_bytes())
            lines = [line.replace(str(log), kept) for line in lines]
        raise AnalysisError(*(line.replace(f"{root}/", "") for line in lines)) from error


def _about(loaded: LoadedModel) -> dict[str, object]:
    """The facts of a model besides its measurements."""
    model, processor = loaded.model, loaded.processor
    about = {
        "architecture": type(model).__name__,
        "model_type": model.config.model_type,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "reader": type(processor).__name__,
    }
    if loaded.kind == "text":
        about["vocabulary"] = len(processor) if hasattr(processor, "__len__") else None
        about["longest"] = loaded.max_length
    return about


def _geometry(title: str, comparison: Comparison, about: Mapping[str, dict]) -> dict:
    """The content of ``geometry.json``."""
    models = []
    names = names_to_share(name for name, _ in comparison.runs)
    for ((name, _), tables), called in zip(comparison.runs.items(), names, strict=True):
        model = geometry_of(tables, about[name]) | {"title": comparison.titles[name]}
        model |= {"name": called, "data": data_to_share(model["data"])}
        model["left_out"] = {
            table: why.replace(name, called) for table, why in model["left_out"].items()
        }
        model["model_files"] = {
            path_to_share(file): digest for file, digest in model["model_files"].items()
        }
        models.append(model)
    differences = headline_differences(comparison).astype(object)
    differences = differences.where(differences.notna(), None).to_dict("records")
    return {"version": VERSION, "title": title, "models": models, "differences": differences}


def _stage(
    root: Path, geometry: dict, comparison: Comparison, tables: Iterable[str], is_run: bool
) -> list[str]:
    """Write a book of the pages that apply, for :func:`build_book`; their names."""
    models = [*comparison.trained.values()]
    pages = [page for page in PAGES if _applies(page, models) and (page != "training" or is_run)]
    if not pages:
        raise AnalysisError("of this model nothing can be shown: give more data")
    book = root / "book"
    _copy_look(listing.home(), book)
    left_out = _left_out(models)
    (book / "report").mkdir()
    for page in pages:
        notebook = read_notebook(HOME / f"{page}.ipynb")
        cells = [cell for cell in notebook.cells if not left_out & {*cell.metadata.get("tags", ())}]
        notebook.cells = cells
        for cell in cells:
            # A report is looked at; a reader who wants to copy a cell unfolds it.
            tags = cell.metadata.setdefault("tags", [])
            if cell.cell_type == "code" and not {"parameters", "hide-input"} & {*tags}:
                tags.append("hide-input")
        nbformat.write(notebook, book / "report" / f"{page}.ipynb")
    names = " · ".join(f'<a href="tables/{name}.csv">{name}.csv</a>' for name in tables)
    # The theme writes a title as it is, in three places.
    shown = geometry["title"].replace("<", "‹").replace(">", "›")
    texts = _first_page(geometry, pages) | {"title": plain(shown), "tables": names}
    first = FIRST.format(**texts, geometry=GEOMETRY, card=CARD)
    (book / "index.md").write_text(first, encoding="utf-8")
    chapters = [{"file": f"report/{page}"} for page in pages] + [{"file": "status"}]
    _yaml(root / "_toc.yml", {"format": "jb-book", "root": "index", "chapters": chapters})
    _yaml(root / "_config.yml", _configuration(shown))
    return pages


def _left_out(models: Sequence[Tables]) -> set[str]:
    """The tags of cells that say nothing of these models."""
    attention = all("attention_entropy" in tables for tables in models)
    text = all(tables.run["kind"] == "text" for tables in models)
    widths = [tables.layers["width"].tolist() for tables in models]
    spikes = [tables["spike_dimensions"] for tables in models if "spike_dimensions" in tables]
    applies = {
        "attention": attention,
        "without-attention": not attention,
        "several": len(models) > 1,
        "words": attention and text,
        "same-width": all(width == widths[0] for width in widths),
        "scores": all("score_contributions" in tables for tables in models),
        "spiking": any(map(len, spikes)),
    }
    return {tag for tag, does in applies.items() if not does}


def _copy_look(home: Path, book: Path) -> None:
    """Copy what gives the pages of the book their look, and parameters without a change."""
    for folder in ("_ext", "_static", "_templates"):
        (book / folder).mkdir(parents=True)
        # One by one: of a full disk, copytree would say so for each file.
        for path in (home / folder).glob("[!.]*.*"):
            if path.suffix != ".png":
                shutil.copy(path, book / folder)
    shutil.copy(home / "status.md", book)
    (book / "parameters").mkdir()
    (book / "parameters" / "default.yml").write_text("{}\n", encoding="utf-8")


def _configuration(title: str) -> dict:
    """The configuration of the book, without what a report has no use for."""
    configured = ROOT if listing.is_clone() else listing.home()
    config = yaml.safe_load((configured / "_config.yml").read_text(encoding="utf-8"))
    sphinx = config["sphinx"]
    extensions = sphinx["config"]["extensions"]
    sphinx["config"]["extensions"] = [name for name in extensions if name not in OF_THE_BOOK]
    for name in OF_THE_BOOK:
        sphinx["local_extensions"].pop(name, None)
    config |= {"title": title, "author": "", "bibtex_bibfiles": []}
    sphinx["config"].pop("bibtex_reference_style", None)
    sphinx["config"] |= {"nb_code_prompt_show": "Show code", "nb_code_prompt_hide": "Hide code"}
    # What is not ours is shown as it is, quotation marks and dashes, too.
    sphinx["config"]["smartquotes"] = False
    return config


def _first_page(geometry: dict, pages: Sequence[str]) -> dict[str, str]:
    """The parts of the first page."""
    models = geometry["models"]
    differing = front_page.changes(geometry)
    return {
        "notes": front_page.notes(models),
        "unusual": front_page.unusual(models),
        "changes": f"## What changed most\n\n{differing}" if differing else "",
        "glossary": front_page.glossary(pages),
        "about": front_page.facts(models),
    }


def _applies(page: str, models: Sequence[Tables]) -> bool:
    """True if every model has the tables of a page, and some model has rows in each."""
    if page == "among" and references(*models).empty:
        return False
    if page == "representations" and len(models) < 2:
        return False
    for name in PAGES[page]:
        if not all(name in tables for tables in models):
            return False
        rows = sum(len(tables[name]) for tables in models)
        if not rows and name not in MAY_BE_EMPTY:
            return False
    return True


def _yaml(path: Path, content: dict) -> None:
    path.write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True), encoding="utf-8")


def headline_numbers(model: dict) -> dict[str, float | int | None]:
    """The few numbers by which the index tells models apart."""
    hidden = [layer.get("anisotropy", {}).get("hidden") for layer in model["layers"]]
    entropy = [layer["entropy"]["value"] for layer in model["layers"] if "entropy" in layer]
    cosines = [number["value"] for number in hidden if number]
    ratios = [spike["ratio"] for spike in model["spikes"] or ()]
    sinks = [row for row in (model["sinks"] or {}).get("all_heads", ()) if row["position"] == 1]
    return {
        "highest average cosine": max(cosines, default=None),
        "lowest entropy": min((value for value in entropy if value is not None), default=None),
        "heads with a sink at the first token": sinks[0]["share_of_heads"] if sinks else None,
        "longest token over median": max(ratios, default=None),
        "outlier dimensions": len({row["dimension"] for row in model["outlier_dimensions"]}),
    }


def _tables(comparison: Comparison, run: Comparison | None) -> dict[str, pd.DataFrame]:
    """The tables that lie beside the pages, by name."""
    tables = {**comparison}
    for name in comparison:
        tables[f"{name}_difference"] = comparison.differences(name)
    if run:
        tables["training"] = headlines(run)
    return {name: table for name, table in tables.items() if len(table)}


def _write(
    site: Path, geometry: dict, tables: Mapping[str, pd.DataFrame], pages: list[str]
) -> None:
    """Write the files beside the pages; ``report.json`` last."""
    text = json.dumps(geometry, indent=1, ensure_ascii=False, allow_nan=False)
    (site / GEOMETRY).write_text(text + "\n", encoding="utf-8")
    (site / CARD).write_text(model_card(geometry), encoding="utf-8")
    (site / "tables").mkdir()
    for name, table in tables.items():
        table.to_csv(site / "tables" / f"{name}.csv", index=False, float_format="%.6g")
    models = []
    for model in geometry["models"]:
        described = {key: model[key] for key in ("name", "title", "model_revision", "notes")}
        models.append(described | {"headlines": headline_numbers(model)})
    first = geometry["models"][0]
    about = {
        "version": VERSION,
        "title": geometry["title"],
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "library": __version__,
        "pages": pages,
        "kind": first["kind"],
        "data": first["data"],
        "data_sha256": first["data_sha256"],
        "texts": first["texts"],
        "models": models,
    }
    text = json.dumps(about, indent=1, ensure_ascii=False, allow_nan=False)
    (site / REPORT).write_text(text + "\n", encoding="utf-8")


def model_card(geometry: dict) -> str:
    """A model card of Hugging Face, whose metadata and section have the headline numbers."""
    from huggingface_hub import EvalResult, ModelCardData

    results = []
    lines = []
    first = geometry["models"][0]
    for model in geometry["models"]:
        lines += [f"### {plain(model['title'])}", "", "| | value |", "|:---|---:|"]
        for name, value in headline_numbers(model).items():
            if value is not None:
                lines.append(f"| {name} | {value:.4g} |")
        lines += ["", *front_page.card_lines(model)]
    data = data_name(first["data"])
    for name, value in headline_numbers(first).items():
        if value is not None:
            result = EvalResult(
                task_type="feature-extraction",
                dataset_type=data,
                dataset_name=data,
                metric_type=name.replace(" ", "_"),
                metric_name=name,
                metric_value=value,
            )
            results.append(result)
    head = ModelCardData(model_name=first["title"], eval_results=results or None)
    read = f"{first['tokens']:,} tokens, SHA-256 `{first['data_sha256'][:12]}`"
    how = (
        f"Measured with analysis_lib {__version__} on {first['texts']:,} items of {code(data)} "
        f"({read}), in {first['dtype']}. The average cosine is that of two distinct tokens of the "
        "corpus, exact; entropies are over their largest value; a sink is a key that receives "
        "more than 0.3 of the attention of the queries that see it. "
        f"All layers, with 95 % intervals over texts, are in `{GEOMETRY}`."
    )
    body = "\n".join([*lines, how, ""])
    return f"---\n{head.to_yaml()}\n---\n\n## Geometry of self-attention\n\n{body}"


# --- The index of a folder of reports -------------------------------------------------------------


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="{mark}"><title>Reports</title><style>
:root {{ color-scheme: light dark; }}
body {{ font: 1rem/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; }}
div {{ overflow-x: auto; }}
table {{ border-collapse: collapse; }}
th, td {{ padding: 0.3rem 0.8rem 0.3rem 0; text-align: left; vertical-align: top; }}
th {{ border-bottom: 1px solid; }}
td.number, th.number {{ text-align: right; font-variant-numeric: tabular-nums; }}
</style></head><body><main><h1>Reports</h1><p>{count} in this folder.</p>
<div><table><thead><tr>{heads}</tr></thead><tbody>
{rows}
</tbody></table></div></main></body></html>
"""  # noqa: E501


def _sealed(text: str) -> str:
    """A page with the hash of all of it in its last line."""
    return f"{text}<!-- {INDEX} {hashlib.sha256(text.encode()).hexdigest()} -->\n"


def is_index(page: Path) -> bool:
    """True if :func:`build_index` has written a page, and it is unchanged."""
    try:
        text = page.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False
    return text == _sealed(text[: text.rfind("<!--")])


def build_index(folder: Path) -> Path:
    """A page that lists the reports in the folders of a folder, from their ``report.json`` alone.

    A ``report.json`` that is damaged, or of another program, is left out with a note.

    Raises:
        AnalysisError: there is no report, or the folder has an ``index.html`` of its own.
    """
    page = folder / "index.html"
    if os.path.lexists(page) and not is_index(page):
        raise AnalysisError(
            f"{page} is no index of reports: move it, or give the folder that holds those of "
            "reports"
        )
    reports = {}
    for path in sorted(folder.glob(f"*/{REPORT}")):
        try:
            reports[path.parent.name] = _description(path)
        except AnalysisError as error:
            logging.getLogger(__name__).warning(
                "note: a report is left out of the index: %s", error
            )
    if not reports:
        raise AnalysisError(f"{folder} holds no reports: give a folder whose folders are reports")
    reports = dict(sorted(reports.items(), key=lambda item: item[1]["title"].casefold()))
    # The columns are the headline numbers of all models.
    numbers = {}
    for about in reports.values():
        for model in about["models"]:
            numbers |= dict.fromkeys(model["headlines"])
    heads = "".join(f"<th>{name}</th>" for name in ("report", "model", "measured on"))
    heads += "".join(f'<th class="number">{escape(name)}</th>' for name in numbers)
    lines = []
    for name, about in reports.items():
        link = f'<a href="{address(name, "index.html")}">{escape(about["title"])}</a>'
        for model in about["models"]:
            lines.append(_index_row(link, model, about, numbers))
            # Only its first row names a report.
            link = ""
    text = PAGE.format(mark=INDEX, count=len(reports), heads=heads, rows="\n".join(lines))
    files.write(page, _sealed(text))
    return page


def _index_row(link: str, model: Mapping, about: Mapping, numbers: Iterable[str]) -> str:
    """The row of a model of a report in the index."""
    title = escape(model["title"])
    for note in model.get("notes", ()):
        title += f"<br><small>{escape(note)}</small>"
    data = escape(data_name(about["data"]))
    cells = [link, title, f"{about['texts']:,} of {data}"]
    body = "".join(f"<td>{cell}</td>" for cell in cells)
    for name in numbers:
        body += f'<td class="number">{_shown(model["headlines"].get(name))}</td>'
    return f"<tr>{body}</tr>"


def _shown(number: float | None) -> str:
    if number is None:
        return "–"
    return f"{number:,}" if isinstance(number, int) else f"{number:.3g}"


def _description(path: Path) -> dict:
    """The content of a ``report.json``.

    Raises:
        AnalysisError: it is damaged, or says something else.
    """
    about = files.read_json(path, "make the report again")
    models = about.get("models")
    is_report = isinstance(about.get("title"), str) and isinstance(about.get("data"), str)
    is_report = is_report and type(about.get("texts")) is int
    has_models = isinstance(models, list) and bool(models) and all(map(_is_model, models))
    if not is_report or not has_models:
        raise AnalysisError(f"{path} is no description of a report: make the report again")
    return about


def _is_model(model: object) -> bool:
    """True if an entry of a ``report.json`` has the title and the numbers of a model."""
    if not isinstance(model, dict) or not isinstance(model.get("title"), str):
        return False
    # Reports of earlier versions have no notes.
    headlines, notes = model.get("headlines"), model.get("notes", [])
    if not isinstance(headlines, dict) or not isinstance(notes, list):
        return False
    if not all(isinstance(note, str) for note in notes):
        return False
    return all(value is None or type(value) in (int, float) for value in headlines.values())
