"""The commands of the book: run, book, report, pretrain, dynamics, classifiers, train, claims,
explain.
"""

import argparse
import dataclasses
import os
import shutil
from collections.abc import Callable, Iterator
from os.path import expanduser
from pathlib import Path
from typing import TYPE_CHECKING

from analysis_lib.cli import (
    DEVICE,
    WORKERS,
    Commands,
    Instead,
    count,
    decimal,
    folder,
    known_names,
    made,
    model_dtype,
    print_names,
    refuse_others,
    say,
    sole_writer,
    whole,
)
from analysis_lib.errors import BEGINS_ANEW, CONTINUES, AnalysisError, decimal_number, whole_number

if TYPE_CHECKING:
    import pandas as pd

# What these commands import of the packages that the extra brings.
NEEDED = (
    "book",
    "altair",
    "ipykernel",
    "jupyter_book",
    "matplotlib",
    "nbclient",
    "papermill",
    "psutil",
    "seaborn",
)
# The option -p, which sets parameters of notebooks.
PARAMETERS = {
    "nargs": 2,
    "action": "append",
    "default": [],
    "metavar": ("NAME", "VALUE"),
    "dest": "parameters",
    "help": "set a parameter (may be repeated)",
}


def add_commands(commands: Commands) -> None:
    """Add all of them: an entry point of the group ``analysis_lib.commands``."""
    _add_pretrain(commands)
    _add_train(commands)
    _add_dynamics(commands)
    _add_classifiers(commands)
    _add_run(commands)
    _add_book(commands)
    _add_report(commands)
    _add_claims(commands)
    _add_explain(commands)


def _add_pretrain(commands: Commands) -> None:
    add = commands.add(
        "pretrain",
        _pretrain,
        "pretrain a BERT, or its like, of your own and keep checkpoints",
        "Once for each seed, by masked language modelling. A run that was stopped goes on with the "
        "same command.",
        "--data lines.txt --config config.json --steps 2000 --out runs/mine",
        interrupted="interrupted: no state of the training is kept yet, and the same command "
        "begins it anew",
        requires=NEEDED,
    )
    add("--out", required=True, type=folder, help="folder for the checkpoints, losses and settings")
    add(
        "--data",
        type=expanduser,
        help="texts: a name listed by `datasets`, file.csv:COLUMN or lines.txt",
    )
    add("--model-type", help="architecture, as transformers names it (default bert)")
    add(
        "--config",
        type=Path,
        help="JSON file with what differs from the defaults of its configuration",
    )
    add("--steps", type=whole, help="number of batches")
    add("--batch", type=whole, help="sequences in a batch")
    add("--length", type=whole, help="tokens in a sequence")
    add("--vocabulary", type=whole, help="largest number of word pieces")
    add("--cased", action="store_true", default=None, help="keep capital letters, and accents")
    add(
        "--tokenizer",
        type=expanduser,
        help="a name or folder whose tokenizer to take, instead of learning one",
    )
    add("--learning-rate", type=decimal, help="its largest value")
    add("--warmup", type=decimal, help="share of the steps during which the learning rate rises")
    add("--weight-decay", type=decimal, help="of the weight matrices")
    add("--seeds", default="0", help="seeds of the run, comma-separated (default 0)")
    add("--workers", type=whole, default=1, help="seeds to train at once (default 1)")
    add("--device", **DEVICE)


def _pretrain(options: argparse.Namespace) -> None:
    from analysis_book.training import Pretraining, pretrain
    from analysis_lib import files

    given = {}
    for setting in dataclasses.fields(Pretraining):
        value = getattr(options, setting.name, None)
        if value is not None:
            given[setting.name] = value
    if options.config is not None:
        wanted = 'give a JSON object such as {"hidden_size": 192}'
        given["configuration"] = files.read_json(options.config, wanted)
    seeds = _numbers("--seeds", options.seeds, whole_number)
    pretrain(
        options.out,
        Pretraining(**given),
        seeds=seeds,
        workers=options.workers,
        device=options.device,
    )
    say(f"wrote the checkpoints of seed {', '.join(map(str, seeds))} to {options.out}")


def _add_train(commands: Commands) -> None:
    add = commands.add(
        "train",
        _train,
        "train one of the small models anew",
        "Its score on held-out data is printed beside that of the model that comes with the book.",
        "digits-vit --out results/digits-vit",
        interrupted=BEGINS_ANEW,
        requires=NEEDED,
    )
    add(
        "name",
        metavar="NAME",
        help="a small model of `models`, with other settings as in digits-vit@steps=50@seed=1",
    )
    add(
        "--out",
        type=folder,
        help="a new folder for the model (default: NAME, in the current folder)",
    )


def _train(options: argparse.Namespace) -> None:
    from analysis_book.training.recipes import train

    out = options.out or Path(options.name)
    for row in train(options.name, out).itertuples():
        interval = f"95 % interval {row.ci_low:.4f} to {row.ci_high:.4f}"
        print(
            f"{row.model}: {row.metric} {row.score:.4f} on held-out data ({interval}; baseline "
            f"{row.baseline:.4f})"
        )
    say(f"wrote the model to {out}")


def _add_dynamics(commands: Commands) -> None:
    add = commands.add(
        "dynamics",
        _dynamics,
        "measure every checkpoint of a run, as Parquet tables",
        "Queries, keys, attention and hidden states along a training, with the losses.",
        "runs/mine --out results/dynamics",
        interrupted=CONTINUES,
        requires=NEEDED,
    )
    add(
        "run",
        metavar="RUN",
        help="a run, such as bert-4 or multiberts, or a folder that pretrain wrote",
    )
    add("--out", required=True, type=folder, help="folder for the tables and dynamics.json")
    add(
        "--data",
        type=expanduser,
        default="wikipedia:held-out",
        help="texts (default wikipedia:held-out)",
    )
    add("--limit", type=whole, default=128, help="number of texts (default 128)")
    add("--seed", type=whole, default=0, help="for the draw of texts and vectors (default 0)")
    add("--seeds", default="0", help="seeds of the run, comma-separated (default 0)")
    add(
        "--tokenizer",
        type=expanduser,
        help="where the tokenizer is, if not with the run: a name or folder",
    )


def _dynamics(options: argparse.Namespace) -> None:
    from analysis_book.training.dynamics import TABLES, dynamics, output
    from analysis_book.training.runs import run_description
    from analysis_lib import corpora
    from analysis_lib.measurement.tables import table_files

    seeds = _numbers("--seeds", options.seeds, whole_number)
    # Misspelt names are refused before anything is written.
    run_description(options.run)
    corpora.data_identity(options.data)
    writing = output(options.out, options.run, options.data)
    writing.check(table_files(TABLES, writing.last))
    with sole_writer(writing):
        chosen = {"seeds": seeds, "tokenizer": options.tokenizer}
        tables = dynamics(options.run, options.data, options.limit, options.seed, **chosen)
        tables.save(options.out)
    numbers = f"{count(len(tables), 'table')} of {count(len(tables.steps), 'step')}"
    say(f"wrote {numbers} to {options.out}")


def _add_classifiers(commands: Commands) -> None:
    add = commands.add(
        "classifiers",
        _classifiers,
        "train self-attention classifiers and measure them, as CSV tables",
        "Of several depths, weights on entropy and seeds, on texts with classes.",
        "--data reviews --layers 1,2 --entropy-weights 0.1 --seeds 0,1,2 --out results/reviews",
        interrupted=CONTINUES,
        requires=NEEDED,
    )
    known = "a corpus with classes: reviews, FOLDER/hatexplain, reviews.csv:text:label"
    add("--data", required=True, type=expanduser, help=known)
    add("--out", required=True, type=folder, help="folder for the tables and results.json")
    add(
        "--layers",
        default="1,2,3,4,5",
        help="depths, without a weight on entropy (default 1,2,3,4,5)",
    )
    add(
        "--entropy-weights",
        default="0.1,1,10,100",
        help="for one layer each: 1000 λ (default 0.1,1,10,100)",
    )
    add(
        "--test", type=expanduser, help="texts with classes to test on, where a split was published"
    )
    add("--limit", type=whole, default=0, help="texts to train on (default 0: all)")
    add(
        "--utterances",
        type=whole,
        default=1000,
        help="texts of the test split to measure on (default 1000)",
    )
    add("--epochs", type=whole, default=50, help="at most (default 50)")
    add(
        "--patience",
        type=whole,
        default=5,
        help="epochs without a gain after which training stops (default 5)",
    )
    add(
        "--sensitivity",
        metavar="SEEDS",
        help="also vary, with these seeds, what the paper leaves open",
    )
    add("--sensitivity-layers", default="1", help="depths of these (default 1)")
    add("--seeds", default="0,1,2,3,4", help="comma-separated (default 0,1,2,3,4)")


def _classifiers(options: argparse.Namespace) -> None:
    from analysis_book.papers.fosse import trials

    settings = {
        "layers": _numbers("--layers", options.layers, whole_number),
        "entropy_weights": _numbers("--entropy-weights", options.entropy_weights, decimal_number),
        "seeds": _numbers("--seeds", options.seeds, whole_number),
        "limit": options.limit,
        "test": options.test,
        "utterances": options.utterances,
        "epochs": options.epochs,
        "patience": options.patience,
        "sensitivity_layers": _numbers(
            "--sensitivity-layers", options.sensitivity_layers, whole_number
        ),
    }
    if options.sensitivity is not None:
        settings["sensitivity_seeds"] = _numbers("--sensitivity", options.sensitivity, whole_number)
    output = trials.output(options.out, options.data)
    output.check(trials.FILES)
    with sole_writer(output):
        trials.record(options.data, options.out, **settings)
    say(f"wrote the measurements of classifiers of {options.data} to {options.out}")


def _numbers(option: str, text: str, read: Callable[[str], float]) -> list:
    try:
        return [read(part) for part in text.split(",")]
    except ValueError:
        wanted = "numbers, as in 0.001,0.1"
        if read is whole_number:
            wanted = "whole numbers, as in 0,1,2"
        raise AnalysisError(f"{option} is {text!r}: give {wanted}") from None


def _add_run(commands: Commands) -> None:
    interrupted = BEGINS_ANEW
    if os.environ.get("ANALYSIS_LIB_MEASUREMENTS") != "":
        interrupted = (
            "interrupted: no copy was written; the same command runs all cells again, which find "
            "what they measured"
        )
    add = commands.add(
        "run",
        _run,
        "execute one notebook with new parameters",
        "The copy holds what its cells print and draw. --list says which notebooks there are, "
        "--parameters what one of them can be given.",
        "--list",
        "outliers/attention --parameters",
        "outliers/attention -p model path/to/model -p data reviews.csv:text --out "
        "results/notebooks",
        interrupted=interrupted,
        requires=NEEDED,
    )
    known = "a file, or a page of the book such as anisotropy/layers"
    add("notebook", nargs="?", type=Path, metavar="NOTEBOOK", help=known).completer = _pages
    add(
        "--list",
        action="store_true",
        dest="list_notebooks",
        help="list the notebooks, and run none",
    )
    known = "list the parameters of the notebook, with their defaults, and do not run it"
    add("--parameters", action="store_true", dest="list_parameters", help=known)
    add("-p", **PARAMETERS)
    add("--out", type=folder, help="folder for the executed copy (default: the current folder)")


def _run(options: argparse.Namespace) -> None:
    from analysis_book import build

    given = {"NOTEBOOK": options.notebook, "--parameters": options.list_parameters}
    given |= {"-p": options.parameters, "--out": options.out}
    if options.list_notebooks:
        _refuse_given(given, "--list lists the notebooks, and runs none")
        print_names(build.titles())
        return
    if options.notebook is None:
        raise AnalysisError("NOTEBOOK is missing: give one of `analysis-lib run --list`, or a file")
    if options.list_parameters:
        _refuse_given(
            {"-p": options.parameters, "--out": options.out},
            "--parameters lists them, and runs nothing",
        )
        rows = [["parameter", "type", "default", ""]]
        for name, declared in build.commented(build.located(options.notebook)).items():
            rows.append([name, *declared])
        print(build.in_columns(rows, _width()))
        return
    notebook = build.located(options.notebook)
    spec = build.notebook_parameters(notebook)
    parameters = build.coerce(options.parameters, spec)
    out = options.out or Path(".")
    with made(out):
        # Misspelt models and corpora, before a kernel starts.
        build.inputs(build.complete(parameters, spec, str(notebook)))
        name = "-".join(options.notebook.parts) + ".ipynb"
        if options.notebook.is_file():
            name = notebook.name
        executed = build.run_notebook(notebook, parameters, out / name)
    say(f"executed notebook: {executed}")


def _refuse_given(given: dict[str, object], reason: str) -> None:
    """Refuse the first argument that is given, and has no effect for a reason."""
    for name, value in given.items():
        if value:
            raise AnalysisError(f"{reason}: leave {name} out")


def _add_book(commands: Commands) -> None:
    add = commands.add(
        "book",
        _book,
        "execute every notebook and build the site",
        "Only what has changed is executed again. It runs in a clone, and the site is in "
        "_build/html.",
        "--profile paper",
        "-p model path/to/model -p data reviews.csv:text",
        interrupted=CONTINUES,
        requires=NEEDED,
    )
    add("--profile", default="default", help="smoke, default, paper or local")
    add("-p", **PARAMETERS)


def _book(options: argparse.Namespace) -> None:
    from analysis_book import build

    parameters = {}
    # Without parameters, no notebook need be read for theirs.
    if options.parameters:
        parameters = build.coerce(options.parameters, build.book_parameters())
    say(f"the site is at {build.build_book(options.profile, parameters)}")


def _add_report(commands: Commands) -> None:
    add = commands.add(
        "report",
        _report,
        "build a site about a model, or about several side by side",
        "Each model is measured once; pages, tables as CSV, geometry.json and a model card say "
        "what was found.",
        'path/to/model --data reviews.csv:text --title "My model" --out reports/mine',
        "path/to/base path/to/tuned --data reviews.csv:text --out reports/tuned",
        interrupted=BEGINS_ANEW,
        requires=NEEDED,
    )
    known = (
        "as --model of `measure`, several for their differences; or a run, a folder with "
        "checkpoints"
    )
    add("models", nargs="*", default=[], metavar="MODEL", help=known).completer = known_names
    add("--data", type=expanduser, help="as --data of `measure`").completer = known_names
    add("--title", help="of the report (default: what its models are called)")
    add(
        "--out",
        type=folder,
        help="folder of the site; a report on the same models and data is replaced",
    )
    add("--limit", type=whole, default=1500, help="measure at most this many items (default 1500)")
    add("--seed", type=whole, default=0, help="with which they are drawn (default 0)")
    add(
        "--dtype",
        help="float32 (default), float64, bfloat16 or float16; of one model, as "
        "MODEL@dtype=bfloat16",
    )
    add(
        "--units",
        help="column of what each text is a part of, such as its document: intervals are "
        "over these",
    )
    known = "a name or folder to read the tokenizer from, where it is not the models'"
    add("--tokenizer", type=expanduser, help=known)
    add("--workers", **WORKERS)
    add("--device", **DEVICE)
    known = "list the reports in a folder, and build none"
    add("--index", type=folder, action=Instead, metavar="FOLDER", help=known)


def _report(options: argparse.Namespace) -> None:
    if options.index is not None:
        refuse_others(
            options, {"index", "quiet", "debug", "help"}, "--index lists the reports that are there"
        )
        from analysis_book.build.reports import build_index

        say(f"the index is at {build_index(options.index)}")
        return
    for name, value in (
        ("MODEL", options.models),
        ("--data", options.data),
        ("--out", options.out),
    ):
        if not value:
            raise AnalysisError(
                f"{name} is missing: give analysis-lib report MODEL --data DATA --out FOLDER"
            )
    from analysis_book.build.reports import build_report, report_output
    from analysis_lib.models import ModelName

    models = [expanduser(name) for name in options.models]
    model_dtype(options, models)
    for index, given in enumerate(models):
        name = ModelName.parse(given)
        models[index] = str(dataclasses.replace(name, dtype=name.dtype or options.dtype))
    draw = {"limit": options.limit, "seed": options.seed, "units": options.units}
    work = {name: getattr(options, name) for name in ("tokenizer", "device", "workers")}
    with sole_writer(report_output(models, options.data, options.out)):
        page = build_report(
            models, options.data, options.out, title=options.title or "", **draw, **work
        )
    say(f"the report is at {page}")


def _add_claims(commands: Commands) -> None:
    add = commands.add(
        "claims",
        _claims,
        "print the ledger: the published claims that the book tests, and the verdicts",
        "Those of the last build, or of executed notebooks. --csv has the sentences, sources and "
        "bounds in full.",
        "",
        "--require maruta-middle-gap",
        "results/notebooks/outliers-attention.ipynb --csv",
        requires=NEEDED,
    )
    add(
        "executed",
        nargs="*",
        type=Path,
        metavar="EXECUTED",
        help="executed notebooks (default: those of the book)",
    )
    add("--csv", action="store_true", help="print the verdicts as CSV")
    add(
        "--require",
        metavar="CLAIMS",
        help="status 1 unless all verdicts on these hold (comma-separated)",
    )


def _claims(options: argparse.Namespace) -> None:
    from analysis_book.build.ledger import NOT_RUN, ledger
    from analysis_book.build.listing import ROOT
    from analysis_book.papers import claims

    names = [] if options.require is None else options.require.split(",")
    required = [claims.claim(name.strip()).id for name in names]
    for path in options.executed:
        if not path.is_file():
            raise AnalysisError(f"{path} is no file: give executed notebooks")
    pages = {str(path.with_suffix("")): path for path in options.executed}
    if not pages:
        home = ROOT / "_build" / "executed" / "default"
        for path in sorted(home.glob("*/*.ipynb")):
            pages[str(path.relative_to(home).with_suffix(""))] = path
    rows = ledger(pages)
    if options.csv:
        judged = rows[rows["verdict"] != NOT_RUN]
        print(judged.to_csv(index=False).rstrip())
    else:
        print("\n".join(_ledger(rows, _width())))
    for name in required:
        verdicts = rows.loc[rows["id"] == name, "verdict"]
        if not verdicts.isin((claims.HOLDS, claims.SMALL)).all():
            raise AnalysisError(
                f"not all verdicts on {name} are that it holds: {', '.join(verdicts)}"
            )


def _ledger(rows: "pd.DataFrame", width: int) -> Iterator[str]:
    """The lines of `claims`: each claim by its name and bound, and its verdicts below it."""
    from analysis_book.build.ledger import NOT_RUN
    from analysis_book.build.listing import wrapped
    from analysis_book.figures.verdicts import about, number

    records = rows.to_dict("records")
    cells = []
    for row, on in zip(records, about(rows), strict=True):
        verdict = row["verdict"]
        if row["after"] != verdict:
            verdict += f" (corrected: {row['after']})"
        cells.append(["", verdict, on, number(row)])
    last = ""
    for row, text in zip(records, wrapped(cells, width), strict=True):
        if row["verdict"] == NOT_RUN:
            yield f"{row['id']}: {NOT_RUN}"
            continue
        if row["id"] != last:
            yield f"{row['id']} ({row['direction']} {row['bound']:g})"
        yield text
        last = row["id"]


def _add_explain(commands: Commands) -> None:
    add = commands.add(
        "explain",
        _explain,
        "say what transformers returns of a model: hidden states, attentions, padding",
        "It is called a few times on a short input, and what it returns is compared with what its "
        "modules read and give. The atlas of the book has the same of each type of model.",
        "minilm",
        "path/to/model",
    )
    known = "a name listed by `models`, a Hub id, or a folder"
    add("model", type=expanduser, metavar="MODEL", help=known).completer = known_names


def _explain(options: argparse.Namespace) -> None:
    from analysis_book.atlas.explaining import explain
    from analysis_book.build.listing import in_columns

    card = explain(options.model)
    rows = [("", "you might expect", "  you get")]
    for fact in card.table.itertuples():
        mark = "≠ " if fact.differs else "  "
        rows.append((fact.fact, fact.expected, mark + fact.given))
    print(card.title, in_columns(rows, _width()), sep="\n\n")
    for sentence in card.warnings:
        print(f"\n{sentence}", end="")
    for heading, code in card.code.items():
        indented = "\n".join(f"    {line}".rstrip() for line in code.splitlines())
        print(f"\n\n{heading}:\n\n{indented}", end="")
    print()


def _width() -> int:
    """Of the terminal, in letters."""
    return shutil.get_terminal_size((100, 24)).columns


def _pages(**_: object) -> list[str]:
    """The names of notebooks, by which the shell completes."""
    from analysis_book import build

    return [*build.titles()]
