# PYTHON_ARGCOMPLETE_OK
"""The command line, ``analysis-lib COMMAND``: measure, train, execute notebooks, list what is known."""

import argparse
import ast
import dataclasses
import errno
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from os.path import expanduser
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import argcomplete

from analysis_lib import __version__
from analysis_lib.errors import (
    BEGINS_ANEW,
    CONTINUES,
    AnalysisError,
    decimal_number,
    one_line,
    whole_number,
)
from analysis_lib.progress import Once

if TYPE_CHECKING:
    import pandas as pd

    from analysis_lib import Tables
    from analysis_lib.files import Output

STORES = {"measurements": "finished measurements", "derived": "models trained here, corpora cut into sentences"}
METRICS = (
    "anisotropy mean_vector utterance_similarity qk_alignment head_means attention_entropy attention_by_token_type "
    "dimension_means outlier_dimensions score_contributions score_terms isotropy cosine_by_dimension "
    "attention_received token_norms spike_dimensions output_change next_token_loss masked_token_loss"
)

# The options of `measure` that make sense of vectors.
OF_VECTORS = {"vectors", "metrics", "out", "format", "workers", "quiet", "debug", "help"}


def main(arguments: list[str] | None = None) -> int:
    """Run a command; the exit status is 0 only if everything asked for is there."""
    argcomplete.autocomplete(parser := _parser())
    return carry_out(parser.parse_args(arguments))


def carry_out(options: argparse.Namespace) -> int:
    """Run the command, and say in one line what keeps it from its end."""
    status = 1
    for stream in (sys.stdout, sys.stderr):
        # What a terminal has no letters for is written in numbers.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere if options.quiet else sys.stderr), _notes():
            _refuse_empty(options)
            options.command(options)
        status = 0
        if sys.stdout:
            sys.stdout.flush()
    except BrokenPipeError:
        # Only the reader of the output, such as `head`, has gone; Python would complain of it at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    except KeyboardInterrupt as error:
        # Whoever knows what is kept says so.
        print(str(error) or options.interrupted, file=sys.stderr)
        status = 130
    except Exception as error:
        if options.debug:
            raise
        if isinstance(error, OSError) and not error.filename and error.errno in (errno.ENOSPC, errno.EIO):
            error = AnalysisError(f"standard output cannot be written ({error.strerror}): give another one")
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        print(one_line(error), file=sys.stderr)
    return status


def _refuse_empty(options: argparse.Namespace) -> None:
    """Refuse an option whose value is empty, as is a variable of the shell that is not set."""
    for name, value in vars(options).items():
        if isinstance(value, str) and not value.strip():
            raise AnalysisError(f"--{name.replace('_', '-')} is empty: give a value, or leave it out")


@contextmanager
def _notes() -> Iterator[None]:
    """What the library has to say goes to standard error, once, whatever other libraries do with their logs."""
    logger, handler = logging.getLogger("analysis_lib"), logging.StreamHandler(sys.stderr)
    handler.addFilter(Once())
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = True


class _Parser(argparse.ArgumentParser):
    """One whose errors are one line, as are all others."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {AnalysisError(message)} (see `{self.prog} --help`)\n")


class _Help(argparse.HelpFormatter):
    """Wraps what a command does, and leaves the lines of its examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)


class _Instead(argparse.Action):
    """An option in the place of some that would be required, and of most others, whose defaults it keeps."""

    def __call__(self, parser: argparse.ArgumentParser, options: argparse.Namespace, value: str, *_: object) -> None:
        setattr(options, self.dest, value)
        options.defaults = {action.dest: action.default for action in parser._actions}
        for action in parser._actions:
            action.required &= action.dest not in ("model", "data")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="analysis-lib",
        description="Measure the geometry of self-attention, and build the book about it.",
    )
    parser.add_argument("--version", action="version", version=f"analysis_lib {__version__}")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--quiet", action="store_true", help="show no progress and no notes")
    common.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(
        name: str,
        function: Callable,
        words: str,
        more: str = "",
        *examples: str,
        interrupted: str = "interrupted",
    ) -> Callable:
        """Add a command.

        Args:
            words: what it does; more, and examples of its arguments, are for its own help.
            interrupted: what a Ctrl-C says, unless it is known better where the work is done.
        """
        shown = [f"  analysis-lib {name} {example}".rstrip() for example in examples or ("",)]
        subparser = commands.add_parser(
            name,
            parents=[common],
            help=words,
            description=f"{words[0].upper()}{words[1:]}. {more}",
            epilog="\n".join(["example:" if len(shown) == 1 else "examples:", *shown]),
            formatter_class=_Help,
        )
        subparser.set_defaults(command=function, interrupted=interrupted)
        return subparser.add_argument

    device = {"help": "torch device; by default a GPU where there is one"}
    workers = {"type": _whole, "default": 1, "help": "processes on this machine (default 1)"}
    parameters = {"nargs": 2, "action": "append", "default": [], "metavar": ("NAME", "VALUE"), "dest": "parameters"}
    parameters["help"] = "set a parameter (may be repeated)"

    def add_measurement(metrics: str) -> None:
        """What `measure` and `compare` have in common; metrics are those by default."""
        known = "one of `datasets`, table.csv:COLUMN (also TSV, JSONL, Parquet), lines.txt, a folder, or -"
        add("--data", required=True, type=expanduser, help=known).completer = _known
        known = f"comma-separated, or all but what costs much (default {metrics}): {METRICS}"
        add("--metrics", default=metrics, help=known).completer = lambda **_: METRICS.split()
        add("--limit", type=_whole, help="measure at most this many items, drawn at random")
        add("--seed", type=_whole, help="with which they are drawn (default 0)")
        add("--first", action="store_true", help="take the first --limit items instead of drawing them")
        add("--units", help="column of what each text is a part of, such as its document: intervals are over these")
        add("--out", required=True, type=_folder, help="folder for the tables and run.json")
        add("--format", choices=("parquet", "csv"), default="parquet", help="of the tables (default parquet)")
        add("--dtype", default="float32", help="float32 (default), float64, bfloat16 or float16")
        add(
            "--tokenizer",
            type=expanduser,
            help="a name or folder to read the tokenizer from, where it is not the model's",
        )
        add("--long-texts", default="cut", help="cut (default) long texts, or read them in windows (window)")
        add(
            "--tokens", default="all", help="all (default), or those below a multiple of the median norm, as 'norm<10x'"
        )
        add("--special-tokens", default="keep", help="keep (default) or drop [CLS] and [SEP] as vectors and queries")
        add("--intervention", type=Path, metavar="FILE", help="YAML that says what is changed in the model on the way")

    add = command(
        "measure",
        _measure,
        "measure a model on a corpus, as Parquet tables",
        "Every metric that the model and the corpus can have is measured in one pass; a table is a file, and run.json "
        "says what made them. What was measured before is found again.",
        "--model minilm --data wikipedia --limit 100 --out results/minilm",
        "--model path/to/model --data reviews.csv:text --format csv --out results/mine",
        interrupted=BEGINS_ANEW,
    )
    known = "a name listed by `models`, a Hub id, or a folder"
    add("--model", required=True, type=expanduser, help=known).completer = _known
    given = "a folder of vectors (safetensors, npy, npz) that are measured instead of those of --model on --data"
    add("--vectors", type=expanduser, action=_Instead, help=given)
    add_measurement("all")
    add("--workers", **workers)
    add("--scheduler", help="a Dask cluster instead of --workers: tcp://HOST:PORT")
    idle = "seconds after which a cluster none of whose workers works is given up (default 60)"
    add("--worker-timeout", type=_decimal, default=60, help=idle)
    add("--revision", help="commit, branch or tag of a Hub model")
    add("--device", **device)
    add("--device-map", help="auto: over the GPUs; what they cannot hold lies in memory, and then on disk, until used")
    add("--maps", default="flatten", help="vectors of a convolutional network: maps (flatten, default), or positions")
    add("--tokens-per-batch", type=_whole, default=2048, help="default 2048")

    add = command(
        "compare",
        _compare,
        "measure models side by side, each with its untrained twins",
        "A table has the rows of all models; NAME_difference has what each has more than the first one, with intervals "
        "paired over texts.",
        "minilm smollm2-135m --data wikipedia --limit 100 --out results/both",
        interrupted=BEGINS_ANEW,
    )
    add("models", nargs="+", metavar="MODEL", help="as --model of `measure`").completer = _known
    add_measurement("anisotropy")
    add(
        "--twins",
        type=_whole,
        default=1,
        help="untrained twins of each model, with other random weights (default 1)",
    )
    add("--workers", **workers)
    add("--device", **device)

    add = command(
        "pretrain",
        _pretrain,
        "pretrain a BERT, or its like, of your own and keep checkpoints",
        "Once for each seed, by masked language modelling. A run that was stopped goes on with the same command.",
        "--data lines.txt --config config.json --steps 2000 --out runs/mine",
        interrupted="interrupted: no state of the training is kept yet, and the same command begins it anew",
    )
    add("--out", required=True, type=_folder, help="folder for the checkpoints, losses and settings")
    add("--data", type=expanduser, help="texts: a name listed by `datasets`, file.csv:COLUMN or lines.txt")
    add("--model-type", help="architecture, as transformers names it (default bert)")
    add("--config", type=Path, help="JSON file with what differs from the defaults of its configuration")
    add("--steps", type=_whole, help="number of batches")
    add("--batch", type=_whole, help="sequences in a batch")
    add("--length", type=_whole, help="tokens in a sequence")
    add("--vocabulary", type=_whole, help="largest number of word pieces")
    add("--cased", action="store_true", default=None, help="keep capital letters, and accents")
    add("--tokenizer", type=expanduser, help="a name or folder whose tokenizer to take, instead of learning one")
    add("--learning-rate", type=_decimal, help="its largest value")
    add("--warmup", type=_decimal, help="share of the steps during which the learning rate rises")
    add("--weight-decay", type=_decimal, help="of the weight matrices")
    add("--seeds", default="0", help="seeds of the run, comma-separated (default 0)")
    add("--workers", type=_whole, default=1, help="seeds to train at once (default 1)")
    add("--device", **device)

    add = command(
        "train",
        _train,
        "train one of the small models anew",
        "Its score on held-out data is printed beside that of the model that comes with the book.",
        "digits-vit --out results/digits-vit",
        interrupted=BEGINS_ANEW,
    )
    add("name", metavar="NAME", help="a small model of `models`, with other settings as in digits-vit@steps=50@seed=1")
    add("--out", type=_folder, help="a new folder for the model (default: NAME, in the current folder)")

    add = command(
        "dynamics",
        _dynamics,
        "measure every checkpoint of a run, as Parquet tables",
        "Queries, keys, attention and hidden states along a training, with the losses.",
        "runs/mine --out results/dynamics",
        interrupted=CONTINUES,
    )
    add("run", metavar="RUN", help="a run, such as bert-4 or multiberts, or a folder that pretrain wrote")
    add("--out", required=True, type=_folder, help="folder for the tables and dynamics.json")
    add("--data", type=expanduser, default="wikipedia:held-out", help="texts (default wikipedia:held-out)")
    add("--limit", type=_whole, default=128, help="number of texts (default 128)")
    add("--seed", type=_whole, default=0, help="for the draw of texts and vectors (default 0)")
    add("--seeds", default="0", help="seeds of the run, comma-separated (default 0)")
    add("--tokenizer", type=expanduser, help="where the tokenizer is, if not with the run: a name or folder")

    add = command(
        "classifiers",
        _classifiers,
        "train self-attention classifiers and measure them, as CSV tables",
        "Of several depths, weights on entropy and seeds, on texts with classes.",
        "--data reviews --layers 1,2 --entropy-weights 0.1 --seeds 0,1,2 --out results/reviews",
        interrupted=CONTINUES,
    )
    known = "a corpus with classes: reviews, FOLDER/hatexplain, reviews.csv:text:label"
    add("--data", required=True, type=expanduser, help=known)
    add("--out", required=True, type=_folder, help="folder for the tables and results.json")
    add("--layers", default="1,2,3,4,5", help="depths, without a weight on entropy (default 1,2,3,4,5)")
    add("--entropy-weights", default="0.1,1,10,100", help="for one layer each: 1000 λ (default 0.1,1,10,100)")
    add("--test", type=expanduser, help="texts with classes to test on, where a split was published")
    add("--limit", type=_whole, default=0, help="texts to train on (default 0: all)")
    add("--utterances", type=_whole, default=1000, help="texts of the test split to measure on (default 1000)")
    add("--epochs", type=_whole, default=50, help="at most (default 50)")
    add("--patience", type=_whole, default=5, help="epochs without a gain after which training stops (default 5)")
    add("--sensitivity", metavar="SEEDS", help="also vary, with these seeds, what the paper leaves open")
    add("--sensitivity-layers", default="1", help="depths of these (default 1)")
    add("--seeds", default="0,1,2,3,4", help="comma-separated (default 0,1,2,3,4)")

    kept = "interrupted: no copy was written; the same command runs all cells again, which find what they measured"
    add = command(
        "run",
        _run,
        "execute one notebook with new parameters",
        "The copy holds what its cells print and draw. --list says which notebooks there are, --parameters what one of "
        "them can be given.",
        "--list",
        "outliers/attention --parameters",
        "outliers/attention -p model path/to/model -p data reviews.csv:text --out results/notebooks",
        interrupted=kept if os.environ.get("ANALYSIS_LIB_MEASUREMENTS") != "" else BEGINS_ANEW,
    )
    known = "a file, or a page of the book such as anisotropy/layers"
    add("notebook", nargs="?", type=Path, metavar="NOTEBOOK", help=known).completer = _pages
    add("--list", action="store_true", dest="list_notebooks", help="list the notebooks, and run none")
    known = "list the parameters of the notebook, with their defaults, and do not run it"
    add("--parameters", action="store_true", dest="list_parameters", help=known)
    add("-p", **parameters)
    add("--out", type=_folder, default=Path("."), help="folder for the executed copy (default: the current folder)")

    add = command(
        "book",
        _book,
        "execute every notebook and build the site",
        "Only what has changed is executed again. It runs in a clone, and the site is in _build/html.",
        "--profile paper",
        "-p model path/to/model -p data reviews.csv:text",
        interrupted=CONTINUES,
    )
    add("--profile", default="default", help="smoke, default, paper or local")
    add("-p", **parameters)

    add = command(
        "report",
        _report,
        "build a site about a model, or about several side by side",
        "Each model is measured once; pages, tables as CSV, geometry.json and a model card say what was found.",
        'path/to/model --data reviews.csv:text --title "My model" --out reports/mine',
        "path/to/base path/to/tuned --data reviews.csv:text --out reports/tuned",
        interrupted=BEGINS_ANEW,
    )
    known = "as --model of `measure`, several for their differences; or a run, a folder with checkpoints"
    add("models", nargs="*", metavar="MODEL", help=known).completer = _known
    add("--data", type=expanduser, help="as --data of `measure`").completer = _known
    add("--title", help="of the report (default: what its models are called)")
    add("--out", type=_folder, help="folder of the site; a report on the same models and data is replaced")
    add("--limit", type=_whole, default=1500, help="measure at most this many items (default 1500)")
    add("--seed", type=_whole, default=0, help="with which they are drawn (default 0)")
    add("--dtype", help="float32 (default), float64, bfloat16 or float16; of one model, as MODEL@dtype=bfloat16")
    add("--units", help="column of what each text is a part of, such as its document: intervals are over these")
    known = "a name or folder to read the tokenizer from, where it is not the models'"
    add("--tokenizer", type=expanduser, help=known)
    add("--workers", **workers)
    add("--device", **device)
    add("--index", type=_folder, metavar="FOLDER", help="list the reports in a folder, and build none")

    add = command(
        "claims",
        _claims,
        "print the ledger: the published claims that the book tests, and the verdicts",
        "Those of the last build, or of executed notebooks. --csv has the sentences, sources and bounds in full.",
        "",
        "--require maruta-middle-gap",
        "results/notebooks/outliers-attention.ipynb --csv",
    )
    add("executed", nargs="*", type=Path, metavar="EXECUTED", help="executed notebooks (default: those of the book)")
    add("--csv", action="store_true", help="print the verdicts as CSV")
    add("--require", metavar="CLAIMS", help="status 1 unless all verdicts on these hold (comma-separated)")
    add = command(
        "cache",
        _cache,
        "say what is kept on disk, and clear it",
        "The packages that carry models and corpora stay.",
        "",
        "--clear measurements",
    )
    add("--clear", choices=tuple(STORES), help="remove all of this; it is made again when it is needed")
    command("metrics", _metrics, "list the metrics", "Their names are what --metrics takes, separated by commas.")
    command("models", _models, "list the models known by name", "They are what --model takes.")
    command("datasets", _datasets, "list the corpora known by name", "They are what --data takes.")
    return parser


def _measure(options: argparse.Namespace) -> None:
    # Imported here: torch takes seconds to load, and `--help` and a misspelt option should be answered at once.
    from analysis_lib import load_corpus, load_model, measure, measure_vectors
    from analysis_lib.capture.inputs import Settings
    from analysis_lib.measurement.measuring import refuse_senseless
    from analysis_lib.measurement.tables import table_files
    from analysis_lib.metrics import resolve
    from analysis_lib.models.loading import checked_options

    if options.scheduler and options.workers != 1:
        raise AnalysisError("--workers and --scheduler exclude each other: give one of them")
    # What is misspelt, and a folder that is not ours, are refused before anything is loaded.
    output = _output_of_measure(options)
    output.check(table_files([metric.name for metric in resolve(options.metrics)], output.last, options.format))
    if options.vectors is not None:
        for name, default in options.defaults.items():
            if name not in OF_VECTORS and getattr(options, name, default) != default:
                raise AnalysisError(f"--vectors are measured as they are: leave --{name.replace('_', '-')} out")
        with _sole_writer(output):
            found = measure_vectors(
                options.vectors, metrics=options.metrics, workers=options.workers, checkpoints=options.out
            )
            _save(found, output, options.format)
        return
    checked_options(options.dtype, options.device, options.device_map)
    settings = _settings(options) | {"maps": options.maps, "tokens_per_batch": options.tokens_per_batch}
    draw = _draw(options)
    corpus = load_corpus(options.data, **draw, units=options.units)
    refuse_senseless(options.model, corpus, options.metrics, Settings(**settings), options.workers)
    with _sole_writer(output):
        given = {name: getattr(options, name) for name in ("revision", "dtype", "device", "device_map")}
        work = {name: getattr(options, name) for name in ("workers", "scheduler", "worker_timeout")}
        model = load_model(options.model, processor=options.tokenizer, **given)
        tables = measure(model, corpus, options.metrics, checkpoints=options.out, **settings, **work)
        tables.run.update(draw)
        _save(tables, output, options.format)


def _output_of_measure(options: argparse.Namespace) -> "Output":
    """The folder of the tables, known by what is measured: the model and what is changed in it, and the texts."""
    from analysis_lib.files import Output

    if options.vectors is not None:
        inputs = [options.vectors]
    else:
        inputs = [options.model, options.data]
        inputs += [given for given in (options.revision, options.intervention) if given is not None]
    return Output(options.out, "measure", tuple(map(str, inputs)), "run.json")


def _draw(options: argparse.Namespace) -> dict[str, int | None]:
    """Which items are measured, as ``load_corpus`` takes it: without a seed, the first."""
    if options.first and options.seed is not None:
        raise AnalysisError("--first and --seed exclude each other: give one of them")
    seed = None if options.first else options.seed or 0
    return {"limit": options.limit, "seed": seed}


def _say(line: str) -> None:
    """Say what is done; that nobody reads it any more does not undo it."""
    with suppress(BrokenPipeError):
        print(line)


def _save(tables: "Tables", output: "Output", form: str) -> None:
    from analysis_lib.measurement.tables import save_tables

    save_tables(tables, output, tables.run, form)
    with suppress(OSError):
        tables.checkpoints.unlink()
    report = tables.report
    read = f"{_count(report.tokens, 'token')} in {_count(report.utterances, 'utterance')}"
    _say(f"wrote {_count(len(tables), 'table')} of {read} to {output.folder}")


def _settings(options: argparse.Namespace) -> dict[str, object]:
    """How texts are read, and what is changed in the model on the way, as ``measure`` takes it."""
    if options.special_tokens not in ("keep", "drop"):
        raise AnalysisError(f"--special-tokens is {options.special_tokens!r}: give keep or drop")
    return {
        "special_tokens": options.special_tokens == "keep",
        "long_texts": options.long_texts,
        "tokens": options.tokens,
        "intervention": _intervention(options.intervention),
    }


def _intervention(path: Path | None) -> object:
    """What a file says of a change, or of several."""
    if path is None:
        return None
    from analysis_lib.capture.interventions import interventions
    from analysis_lib.corpora import packages

    wanted = "give a mapping such as {where: residual, layers: [3], dimensions: [99]}, or a list"
    found = packages.read_yaml(path, wanted)
    if not found:
        raise AnalysisError(f"{path} is empty: give a mapping such as {{where: residual, layers: [3]}}, or a list")
    try:
        changes = interventions(found)
    except AnalysisError as error:
        raise AnalysisError(f"{path}: {error}") from error
    if not changes:
        raise AnalysisError(f"{path} changes nothing: give layers, tokens and dimensions that are changed")
    return changes


def _compare(options: argparse.Namespace) -> None:
    from analysis_lib import compare
    from analysis_lib.files import Output
    from analysis_lib.measurement.tables import save_tables, table_files
    from analysis_lib.metrics import resolve

    names = [metric.name for metric in resolve(options.metrics)]
    names += [f"{name}_difference" for name in names]
    inputs = [*options.models, options.data]
    if options.intervention is not None:
        inputs.append(str(options.intervention))
    output = Output(options.out, "compare", tuple(inputs), "run.json")
    output.check(table_files(names, output.last, options.format))
    settings = _settings(options)
    draw = _draw(options)
    settings |= draw | {name: getattr(options, name) for name in ("units", "twins", "dtype", "tokenizer")}
    settings |= {"workers": options.workers, "device": options.device}
    with _sole_writer(output):
        found = compare({options.data: options.models}, options.metrics, **settings)
        runs = [{"twin": twin, **tables.run} for (_, twin), tables in found.runs.items()]
        differences = {f"{name}_difference": found.differences(name) for name in found}
        tables = {**found, **{name: table for name, table in differences.items() if len(table)}}
        save_tables(tables, output, draw | {"runs": runs}, options.format)
    _say(f"wrote {_count(len(tables), 'table')} of {_count(len(options.models), 'model')} to {options.out}")


def _pretrain(options: argparse.Namespace) -> None:
    from analysis_book.training import Pretraining, pretrain
    from analysis_lib.corpora import packages

    names = (setting.name for setting in dataclasses.fields(Pretraining))
    given = {name: value for name in names if (value := getattr(options, name, None)) is not None}
    if options.config is not None:
        wanted = 'give a JSON object such as {"hidden_size": 192}'
        given["configuration"] = packages.read_json(options.config, wanted)
    seeds = _numbers("--seeds", options.seeds, whole_number)
    pretrain(options.out, Pretraining(**given), seeds=seeds, workers=options.workers, device=options.device)
    _say(f"wrote the checkpoints of seed {', '.join(map(str, seeds))} to {options.out}")


def _train(options: argparse.Namespace) -> None:
    from analysis_book.training.recipes import train

    folder = options.out or Path(options.name)
    for row in train(options.name, folder).itertuples():
        interval = f"95 % interval {row.ci_low:.4f} to {row.ci_high:.4f}"
        print(f"{row.model}: {row.metric} {row.score:.4f} on held-out data ({interval}; baseline {row.baseline:.4f})")
    _say(f"wrote the model to {folder}")


def _dynamics(options: argparse.Namespace) -> None:
    from analysis_book.papers.godey.dynamics import TABLES, dynamics, output
    from analysis_book.training.runs import run_description
    from analysis_lib import corpora
    from analysis_lib.measurement.tables import table_files

    seeds = _numbers("--seeds", options.seeds, whole_number)
    # Misspelt names are refused before anything is written.
    run_description(options.run)
    corpora.data_identity(options.data)
    made = output(options.out, options.run, options.data)
    made.check(table_files(TABLES, made.last))
    with _sole_writer(made):
        chosen = {"seeds": seeds, "tokenizer": options.tokenizer}
        found = dynamics(options.run, options.data, options.limit, options.seed, **chosen)
        found.save(options.out)
    _say(f"wrote {_count(len(found), 'table')} of {_count(len(found.steps), 'step')} to {options.out}")


def _classifiers(options: argparse.Namespace) -> None:
    from analysis_book.papers.fosse import trials

    settings = {
        "layers": _numbers("--layers", options.layers, whole_number),
        "entropy_weights": _numbers("--entropy-weights", options.entropy_weights, decimal_number),
        "seeds": _numbers("--seeds", options.seeds, whole_number),
        **{name: getattr(options, name) for name in ("limit", "test", "utterances", "epochs", "patience")},
        "sensitivity_layers": _numbers("--sensitivity-layers", options.sensitivity_layers, whole_number),
    }
    if options.sensitivity is not None:
        settings["sensitivity_seeds"] = _numbers("--sensitivity", options.sensitivity, whole_number)
    output = trials.output(options.out, options.data)
    output.check(trials.FILES)
    with _sole_writer(output):
        trials.record(options.data, options.out, **settings)
    _say(f"wrote the measurements of classifiers of {options.data} to {options.out}")


def _numbers(option: str, text: str, read: Callable[[str], float]) -> list:
    try:
        return [read(part) for part in text.split(",")]
    except ValueError:
        wanted = "whole numbers, as in 0,1,2" if read is whole_number else "numbers, as in 0.001,0.1"
        raise AnalysisError(f"{option} is {text!r}: give {wanted}") from None


def _run(options: argparse.Namespace) -> None:
    from analysis_book import build

    if options.list_notebooks:
        _print_names(book.titles())
        return
    if options.notebook is None:
        raise AnalysisError("NOTEBOOK is missing: give one of `analysis-lib run --list`, or a file")
    if options.list_parameters:
        rows = [["parameter", "type", "default", ""]]
        for name, declared in book.commented(book.located(options.notebook)).items():
            rows.append([name, *declared])
        print(book.in_columns(rows, _width()))
        return
    notebook = book.located(options.notebook)
    spec = book.notebook_parameters(notebook)
    parameters = book.coerce(options.parameters, spec)
    with _made(options.out):
        # Misspelt models and corpora, before a kernel starts.
        book.inputs(book.complete(parameters, spec, str(notebook)))
        name = notebook.name if options.notebook.is_file() else "-".join(options.notebook.parts) + ".ipynb"
        executed = book.run_notebook(notebook, parameters, options.out / name)
    _say(f"executed notebook: {executed}")


def _book(options: argparse.Namespace) -> None:
    from analysis_book import build

    # Without parameters, no notebook need be read for theirs.
    parameters = book.coerce(options.parameters, book.book_parameters()) if options.parameters else {}
    _say(f"the site is at {book.build_book(options.profile, parameters)}")


def _report(options: argparse.Namespace) -> None:
    if options.index is not None:
        if options.models:
            raise AnalysisError("--index lists the reports that are there: leave the models out")
        from analysis_book.build.reports import build_index

        _say(f"the index is at {build_index(options.index)}")
        return
    for name, value in (("MODEL", options.models), ("--data", options.data), ("--out", options.out)):
        if not value:
            raise AnalysisError(f"{name} is missing: give analysis-lib report MODEL --data DATA --out FOLDER")
    from analysis_book.build.reports import build_report, report_output
    from analysis_lib.models.names import DTYPE

    models = [expanduser(name) for name in options.models]
    models = [f"{name}{DTYPE}{options.dtype}" if options.dtype and DTYPE not in name else name for name in models]
    draw = {"limit": options.limit, "seed": options.seed, "units": options.units}
    work = {name: getattr(options, name) for name in ("tokenizer", "device", "workers")}
    with _sole_writer(report_output(models, options.data, options.out)):
        page = build_report(models, options.data, options.out, title=options.title or "", **draw, **work)
    _say(f"the report is at {page}")


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' * (number != 1)}"


def _claims(options: argparse.Namespace) -> None:
    from analysis_book.build.ledger import NOT_RUN, ledger
    from analysis_book.build.listing import ROOT
    from analysis_book.papers import claims

    names = [] if options.require is None else options.require.split(",")
    required = [claims.claim(name.strip()).id for name in names]
    for path in options.executed:
        if not path.is_file():
            raise AnalysisError(f"{path} is no file: give executed notebooks")
    home = ROOT / "_build" / "executed" / "default"
    pages = {str(path.relative_to(home).with_suffix("")): path for path in sorted(home.glob("*/*.ipynb"))}
    rows = ledger({str(path.with_suffix("")): path for path in options.executed} or pages)
    if options.csv:
        judged = rows[rows["verdict"] != NOT_RUN]
        print(judged.to_csv(index=False).rstrip())
    else:
        print("\n".join(_ledger(rows, _width())))
    for name in required:
        if ((found := rows.loc[rows["id"] == name, "verdict"]) != claims.HOLDS).any():
            raise AnalysisError(f"not all verdicts on {name} are that it holds: {', '.join(found)}")


def _ledger(rows: "pd.DataFrame", width: int) -> Iterator[str]:
    """The lines of `claims`: each claim by its name and bound, and its verdicts below it."""
    from analysis_book.build.ledger import NOT_RUN
    from analysis_book.build.listing import wrapped
    from analysis_book.figures.verdicts import about, number

    records, cells = rows.to_dict("records"), []
    for row, on in zip(records, about(rows), strict=True):
        corrected = f" (corrected: {row['after']})" if row["after"] != row["verdict"] else ""
        cells.append(["", row["verdict"] + corrected, on, number(row)])
    last = ""
    for row, text in zip(records, wrapped(cells, width), strict=True):
        if row["verdict"] == NOT_RUN:
            yield f"{row['id']}: {NOT_RUN}"
            continue
        if row["id"] != last:
            yield f"{row['id']} ({row['direction']} {row['bound']:g})"
        yield text
        last = row["id"]


def _width() -> int:
    """Of the terminal, in letters."""
    return shutil.get_terminal_size((100, 24)).columns


def _metrics(options: argparse.Namespace) -> None:
    # Read and not imported: torch takes seconds.
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in Path(__file__).parent.glob("metrics/*.py"))
    classes = [node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
    said = {}
    for found in classes:
        match [node.value.value for node in found.body if ast.unparse(node).startswith("name = ")]:
            case [name]:
                said[name] = ast.get_docstring(found).splitlines()[0]
    _print_names({name: said[name] for name in METRICS.split()})


def _cache(options: argparse.Namespace) -> None:
    from analysis_lib.corpora import packages

    for name, words in STORES.items():
        home = packages.package_directory() / name
        kept = [*home.glob("*")]
        size = sum(path.stat().st_size for entry in kept for path in [entry, *entry.rglob("*")] if path.is_file())
        print(f"{name:{max(map(len, STORES))}}  {size / 1e6:8.0f} MB in {len(kept):4} entries: {words}")
        if options.clear == name and home.is_dir():
            left = packages.cleared(name)
            print(f"cleared {name}{', but for what is not ours: ' if left else ''}{', '.join(left)}")
    print(f"in {packages.package_directory()}")


def _models(options: argparse.Namespace) -> None:
    from analysis_lib.models import known_models

    _print_names(known_models())
    print("or a Hub id (owner/name), or a folder of save_pretrained; NAME:untrained is the same model, untrained")


def _datasets(options: argparse.Namespace) -> None:
    from analysis_lib.corpora import known_corpora

    _print_names(known_corpora())
    print("or file.csv:COLUMN, a text file with one utterance per line, or a folder of images or sounds")


def _known(parsed_args: argparse.Namespace, action: argparse.Action, **_: object) -> list[str]:
    """What completes a name on the command line."""
    from analysis_lib.corpora import known_corpora
    from analysis_lib.models import known_models

    return [name.partition(":")[0] for name in (known_corpora() if action.dest == "data" else known_models())]


def _pages(**_: object) -> list[str]:
    """What completes the name of a notebook."""
    from analysis_book import build

    return [*book.titles()]


def _whole(text: str) -> int:
    try:
        return whole_number(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number, such as 100") from None


def _decimal(text: str) -> float:
    try:
        return decimal_number(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number, such as 0.001") from None


def _folder(text: str) -> Path:
    if not text.strip():
        raise argparse.ArgumentTypeError("give the name of a folder")
    if (path := expanduser(text)).startswith("~"):
        raise argparse.ArgumentTypeError(f"there is no home folder {text.partition('/')[0]}")
    return Path(path)


def _print_names(names: dict[str, str]) -> None:
    width = max(map(len, names))
    for name, description in names.items():
        print(f"{name:{width}}  {description}")


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    """Refuse, before hours of work, a folder that cannot be written; one that was made for nothing goes again."""
    # Not Path.exists, which raises an error of its own where a name is too long.
    new = [path for path in (folder, *folder.parents) if not os.path.exists(path)]
    try:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise AnalysisError(f"{folder} cannot be written ({reason}): give another --out") from error
        yield
    finally:
        with suppress(OSError, ValueError):
            for path in new:
                path.rmdir()


@contextmanager
def _sole_writer(output: "Output") -> Iterator[None]:
    """Keep a second run out of the folder, where the tables of both would mix."""
    with _made(output.folder), output.alone():
        yield


if __name__ == "__main__":
    sys.exit(main())
