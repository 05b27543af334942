"""A book on one model, or on several side by side: ``analysis-lib report MODEL --data D --out
DIR``.

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
from analysis_lib.corpora.sharing import data_name, data_to_share, path_to_share
from analysis_lib.errors import BEGINS_ANEW, CONTINUES, AnalysisError
from analysis_lib.files import Output
from analysis_lib.measurement.comparison import Comparison
from analysis_lib.measurement.measuring import measure_sensible, refuse_unavailable
from analysis_lib.measurement.stored import interruption
from analysis_lib.measurement.tables import Tables
from analysis_lib.models import LoadedModel
from analysis_lib.models.loading import checked_options, load_model
from analysis_lib.models.names import ModelName, names_to_share

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
    "among": ("anisotropy", "mean_vector"),
    "claims": ("anisotropy",),
}
# Of these, a page says that there are none.
MAY_BE_EMPTY = ("spike_dimensions",)
REPORT, GEOMETRY, CARD, INDEX = (
    "report.json",
    "geometry.json",
    "model-card.md",
    "analysis-lib report --index",
)
# Of a page of the book's site, what a report has no use for.
OF_THE_BOOK = ("sphinxcontrib.bibtex", "ledger")
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
    """Measure models on the same texts, build the site of what was found, and return the path of
    its first page.

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
    same = [os.path.realpath(name) if Path(name).is_dir() else name for name in models]
    if repeated := [name for name, one in zip(models, same, strict=True) if same.count(one) > 1]:
        raise AnalysisError(f"{repeated[0]} was given twice: give each model once")
    checked_options("float32", device)
    corpus = load_corpus(data, limit, seed, units=units)
    for name in models:
        refuse_unavailable(name, corpus, "all", Settings(), workers)
    steps, lasting = _steps(models), store.measurements_directory() is not None
    with _scratch(out) as scratch, _kept(scratch):
        every, about = {}, {}
        for name in steps or models:
            with interruption(kept=bool(every and lasting)):
                loaded = load_model(name, processor=tokenizer, device=device)
                every[name, None] = measure_sensible(loaded, corpus, METRICS, workers=workers)
            about[name] = _about(loaded)
            del loaded
        shown = [*steps][:: max(1, len(steps) - 1)] if steps else list(models)
        comparison = Comparison({(name, None): every[name, None] for name in shown})
        title = " ".join(title.split()) or (
            Path(models[0]).name if steps else " and ".join(comparison.titles.values())
        )
        found = _found(title, comparison, about)
        draw = {"data": data, "limit": limit, "seed": seed}
        tables = _tables(comparison, Comparison(every) if steps else None)
        root = scratch / "root"
        pages = _stage(root, found, comparison, tables, bool(steps))
        options = {"units": units, "tokenizer": tokenizer, "device": device}
        draw["options"] = {name: value for name, value in options.items() if value is not None}
        given = {"models": shown, **draw} | ({"run": models[0]} if steps else {})
        with _lasting_messages(root, lasting):
            build_book("default", given, root=root, out=scratch / "site")
        site = scratch / "site"
        _write(site, found, tables, pages)
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
    if len(models) > 1 or not (
        [*folder.glob("checkpoint-*")] or (folder / "pretraining.json").is_file()
    ):
        return {}
    found = checkpoints(models[0])
    if len(found) < 2:
        raise AnalysisError(
            f"{folder} holds the weights of one checkpoint: give {found[0].model} as a model"
        )
    return {checkpoint.model: checkpoint.step for checkpoint in found}


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
    """Inside it, what is said holds when the folder is cleared: the log of the site is kept
    elsewhere.

    Args:
        measured: whether what was measured is kept, of which a Ctrl-C speaks; the notebooks are
            not.
    """
    log = root / "_build" / "build.log"
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(CONTINUES if measured else BEGINS_ANEW) from None
    except AnalysisError as error:
        lines = [str(line) for line in error.args]
        if any(str(log) in line for line in lines):
            descriptor, kept = tempfile.mkstemp(suffix=".log", prefix="analysis-lib-report-")
            with open(descriptor, "wb") as file:
                file.write(log.read_bytes())
            lines = [line.replace(str(log), kept) for line in lines]
        raise AnalysisError(*(line.replace(f"{root}/", "") for line in lines)) from error


def _about(loaded: LoadedModel) -> dict[str, object]:
    """What is known of a model besides what is measured."""
    model, processor = loaded.model, loaded.processor
    about = {
        "architecture": type(model).__name__,
        "model_type": model.config.model_type,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "reader": type(processor).__name__,
    }
    if loaded.kind == "text":
        about |= {"vocabulary": len(processor) if hasattr(processor, "__len__") else None}
        about |= {"longest": loaded.max_length}
    return about


def _found(title: str, comparison: Comparison, about: Mapping[str, dict]) -> dict:
    """What ``geometry.json`` holds."""
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
    root: Path, found: dict, comparison: Comparison, tables: Iterable[str], is_run: bool
) -> list[str]:
    """Write a book of the pages that apply, for :func:`build_book`; their names."""
    several, models = len(comparison.trained) > 1, comparison.trained.values()
    pages = [page for page in PAGES if _applies(page, models) and (page != "training" or is_run)]
    if not pages:
        raise AnalysisError("of this model nothing can be shown: give more data")
    attention = all("attention_entropy" in tables for tables in models)
    leave = {"without-attention"} if attention else {"attention"}
    leave |= set() if several else {"several"}
    leave |= (
        set() if attention and all(tables.run["kind"] == "text" for tables in models) else {"words"}
    )
    widths = [tables.layers["width"].tolist() for tables in models]
    leave |= set() if all(width == widths[0] for width in widths) else {"same-width"}
    scores = all("score_contributions" in tables for tables in models)
    leave |= set() if scores else {"scores"}
    spiking = any(
        len(tables["spike_dimensions"]) for tables in models if "spike_dimensions" in tables
    )
    leave |= set() if spiking else {"spiking"}
    home, book = listing.home(), root / "book"
    for folder in ("_ext", "_static", "_templates"):
        (book / folder).mkdir(parents=True)
        # One by one: of a full disk, copytree would say so for each file.
        for path in (home / folder).glob("[!.]*.*"):
            if path.suffix != ".png":
                shutil.copy(path, book / folder)
    shutil.copy(home / "status.md", book)
    (book / "parameters").mkdir()
    (book / "parameters" / "default.yml").write_text("{}\n", encoding="utf-8")
    (book / "report").mkdir()
    for page in pages:
        notebook = read_notebook(HOME / f"{page}.ipynb")
        notebook.cells = [
            cell for cell in notebook.cells if not leave & {*cell.metadata.get("tags", ())}
        ]
        for cell in notebook.cells:
            # A report is looked at; who wants to copy a cell unfolds it.
            tags = cell.metadata.setdefault("tags", [])
            if cell.cell_type == "code" and "parameters" not in tags:
                tags += [] if "hide-input" in tags else ["hide-input"]
        nbformat.write(notebook, book / "report" / f"{page}.ipynb")
    names = " · ".join(f'<a href="tables/{name}.csv">{name}.csv</a>' for name in tables)
    # The theme writes a title as it is, in three places.
    shown = found["title"].replace("<", "‹").replace(">", "›")
    texts = _first_page(found, pages) | {"title": plain(shown), "tables": names}
    (book / "index.md").write_text(
        FIRST.format(**texts, geometry=GEOMETRY, card=CARD), encoding="utf-8"
    )
    chapters = [{"file": f"report/{page}"} for page in pages] + [{"file": "status"}]
    _yaml(root / "_toc.yml", {"format": "jb-book", "root": "index", "chapters": chapters})
    configured = ROOT if listing.is_clone() else home
    config = yaml.safe_load((configured / "_config.yml").read_text(encoding="utf-8"))
    sphinx = config["sphinx"]
    sphinx["config"]["extensions"] = [
        name for name in sphinx["config"]["extensions"] if name not in OF_THE_BOOK
    ]
    for name in OF_THE_BOOK:
        sphinx["local_extensions"].pop(name, None)
    config |= {"title": shown, "author": "", "bibtex_bibfiles": []}
    sphinx["config"].pop("bibtex_reference_style", None)
    sphinx["config"] |= {"nb_code_prompt_show": "Show code", "nb_code_prompt_hide": "Hide code"}
    # What is not ours is shown as it is, quotation marks and dashes, too.
    sphinx["config"]["smartquotes"] = False
    _yaml(root / "_config.yml", config)
    return pages


def _first_page(found: dict, pages: Sequence[str]) -> dict[str, str]:
    """The parts of the first page."""
    models = found["models"]
    differing = front_page.changes(found)
    return {
        "notes": front_page.notes(models),
        "unusual": front_page.unusual(models),
        "changes": f"## What changed most\n\n{differing}" if differing else "",
        "glossary": front_page.glossary(pages),
        "about": front_page.facts(models),
    }


def _applies(page: str, models: Sequence[Tables]) -> bool:
    """Whether every model has what a page shows, and some model has a row of it."""
    there = all(name in tables for tables in models for name in PAGES[page])
    if page == "among" and references(*models).empty:
        return False
    return there and all(
        any(len(tables[name]) for tables in models)
        for name in PAGES[page]
        if name not in MAY_BE_EMPTY
    )


def _yaml(path: Path, content: dict) -> None:
    path.write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True), encoding="utf-8")


def headline_numbers(model: dict) -> dict[str, float | int | None]:
    """The few numbers by which the index tells models apart."""
    hidden = [layer.get("anisotropy", {}).get("hidden") for layer in model["layers"]]
    entropy = [layer["entropy"]["value"] for layer in model["layers"] if "entropy" in layer]
    cosines = [found["value"] for found in hidden if found]
    sinks = [row for row in (model["sinks"] or {}).get("all_heads", ()) if row["position"] == 1]
    return {
        "highest average cosine": max(cosines, default=None),
        "lowest entropy": min((value for value in entropy if value is not None), default=None),
        "heads with a sink at the first token": sinks[0]["share_of_heads"] if sinks else None,
        "longest token over median": max(
            (spike["ratio"] for spike in model["spikes"] or ()), default=None
        ),
        "outlier dimensions": len({row["dimension"] for row in model["outlier_dimensions"]}),
    }


def _tables(comparison: Comparison, run: Comparison | None) -> dict[str, pd.DataFrame]:
    """The tables that lie beside the pages, by name."""
    tables = {**comparison} | {
        f"{name}_difference": comparison.differences(name) for name in comparison
    }
    tables |= {"training": headlines(run)} if run else {}
    return {name: table for name, table in tables.items() if len(table)}


def _write(site: Path, found: dict, tables: Mapping[str, pd.DataFrame], pages: list[str]) -> None:
    """What lies beside the pages; ``report.json`` last."""
    text = json.dumps(found, indent=1, ensure_ascii=False, allow_nan=False)
    (site / GEOMETRY).write_text(text + "\n", encoding="utf-8")
    (site / CARD).write_text(model_card(found), encoding="utf-8")
    (site / "tables").mkdir()
    for name, table in tables.items():
        table.to_csv(site / "tables" / f"{name}.csv", index=False, float_format="%.6g")
    first = found["models"][0]
    about = {
        "version": VERSION,
        "title": found["title"],
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "library": __version__,
        "pages": pages,
        **{key: first[key] for key in ("kind", "data", "data_sha256", "texts")},
        "models": [
            {key: model[key] for key in ("name", "title", "model_revision", "notes")}
            | {"headlines": headline_numbers(model)}
            for model in found["models"]
        ],
    }
    text = json.dumps(about, indent=1, ensure_ascii=False, allow_nan=False)
    (site / REPORT).write_text(text + "\n", encoding="utf-8")


def model_card(found: dict) -> str:
    """A model card of Hugging Face, whose metadata and section say what was measured, and how."""
    from huggingface_hub import EvalResult, ModelCardData

    results, lines = [], []
    first = found["models"][0]
    for model in found["models"]:
        lines += [f"### {plain(model['title'])}", "", "| | value |", "|:---|---:|"]
        for name, value in headline_numbers(model).items():
            if value is not None:
                lines.append(f"| {name} | {value:.4g} |")
                data = data_name(model["data"])
                kind = {
                    "task_type": "feature-extraction",
                    "dataset_type": data,
                    "dataset_name": data,
                }
                metric = {
                    "metric_type": name.replace(" ", "_"),
                    "metric_name": name,
                    "metric_value": value,
                }
                results += [EvalResult(**kind, **metric)] if model is first else []
        lines += ["", *front_page.card_lines(model)]
    head = ModelCardData(model_name=first["title"], eval_results=results or None)
    read = f"{first['tokens']:,} tokens, SHA-256 `{first['data_sha256'][:12]}`"
    how = (
        f"Measured with analysis_lib {__version__} on {first['texts']:,} items of "
        f"{code(data_name(first['data']))} "
        f"({read}), in {first['dtype']}. The average cosine is that of two distinct tokens of the "
        "corpus, exact; "
        "entropies are over their largest value; a sink is a key that receives more than 0.3 of "
        "the attention of the "
        f"queries that see it. All layers, with 95 % intervals over texts, are in `{GEOMETRY}`."
    )
    return f"---\n{head.to_yaml()}\n---\n\n## Geometry of self-attention\n\n" + "\n".join(
        [*lines, how, ""]
    )


# --- The index of a folder of reports
# ----------------------------------------------------------------------------


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
    """Whether a page is one that :func:`build_index` has written, and as it was written."""
    try:
        text = page.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False
    return text == _sealed(text[: text.rfind("<!--")])


def build_index(folder: Path) -> Path:
    """A page that lists the reports in the folders of a folder, made of their ``report.json``
    alone.

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
    found = {}
    for path in sorted(folder.glob(f"*/{REPORT}")):
        try:
            found[path.parent.name] = _description(path)
        except AnalysisError as error:
            logging.getLogger(__name__).warning(
                "note: a report is left out of the index: %s", error
            )
    if not found:
        raise AnalysisError(f"{folder} holds no reports: give a folder whose folders are reports")
    rows, numbers = [], {}
    for name, about in sorted(found.items(), key=lambda item: item[1]["title"].casefold()):
        for number, model in enumerate(about["models"]):
            numbers |= dict.fromkeys(model["headlines"])
            page_of = address(name, "index.html")
            link = f'<a href="{page_of}">{escape(about["title"])}</a>' if not number else ""
            rows.append((link, model, about))
    heads = "".join(f"<th>{name}</th>" for name in ("report", "model", "measured on"))
    heads += "".join(f'<th class="number">{escape(name)}</th>' for name in numbers)
    lines = []
    for link, model, about in rows:
        said = "".join(f"<br><small>{escape(note)}</small>" for note in model.get("notes", ()))
        data = escape(data_name(about["data"]))
        cells = [link, escape(model["title"]) + said, f"{about['texts']:,} of {data}"]
        values = [model["headlines"].get(name) for name in numbers]
        shown = (
            "–" if v is None else f"{v:,}" if isinstance(v, int) else f"{v:.3g}" for v in values
        )
        body = "".join(f"<td>{cell}</td>" for cell in cells) + "".join(
            f'<td class="number">{cell}</td>' for cell in shown
        )
        lines.append(f"<tr>{body}</tr>")
    text = PAGE.format(mark=INDEX, count=len(found), heads=heads, rows="\n".join(lines))
    files.write(page, _sealed(text))
    return page


def _description(path: Path) -> dict:
    """What a ``report.json`` says of a report.

    Raises:
        AnalysisError: it is damaged, or says something else.
    """
    about = files.read_json(path, "make the report again")
    models = about.get("models")
    is_report = isinstance(about.get("title"), str) and isinstance(about.get("data"), str)
    is_report = is_report and type(about.get("texts")) is int
    if (
        not is_report
        or not isinstance(models, list)
        or not models
        or not all(map(_is_model, models))
    ):
        raise AnalysisError(f"{path} is no description of a report: make the report again")
    return about


def _is_model(model: object) -> bool:
    """Whether an entry of a ``report.json`` has the title and the numbers of a model."""
    if not isinstance(model, dict) or not isinstance(model.get("title"), str):
        return False
    # Reports of earlier versions have no notes.
    headlines, notes = model.get("headlines"), model.get("notes", [])
    if not isinstance(headlines, dict) or not isinstance(notes, list):
        return False
    if not all(isinstance(note, str) for note in notes):
        return False
    return all(value is None or type(value) in (int, float) for value in headlines.values())
