# PYTHON_ARGCOMPLETE_OK
"""The command line, ``analysis-lib COMMAND``: measure, merge, compare, and list known names.

Another package adds commands by an entry point of the group ``analysis_lib.commands``: a function
that is called with :meth:`Commands.add`.
"""

import argparse
import errno
import logging
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from importlib.metadata import entry_points
from os.path import expanduser
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from analysis_lib import __version__
from analysis_lib.errors import (
    BEGINS_ANEW,
    AnalysisError,
    decimal_number,
    one_line,
    require_extra,
    whole_number,
)
from analysis_lib.metrics.listing import catalogue
from analysis_lib.progress import Once

if TYPE_CHECKING:
    from analysis_lib import Tables
    from analysis_lib.files import Output
    from analysis_lib.measurement import LayerCheck

STORES = {
    "measurements": "finished measurements, proofs of captured passes",
    "derived": "models trained here, corpora cut into sentences",
}

DTYPE = {"help": "float32 (default), float64, bfloat16 or float16"}
TOKENIZER = {
    "type": expanduser,
    "help": "a name or folder to read the tokenizer from, where it is not the model's",
}
TEMPLATE = {
    "type": Path,
    "metavar": "FILE",
    "help": "the Jinja template of conversations, in place of the tokenizer's",
}

# Options of `measure` that apply to vectors.
OF_VECTORS = {"vectors", "layers", "check", "metrics", "out", "format", "workers", "bins"}
OF_VECTORS |= {"quiet", "debug", "help"}
# Options that apply to the model of --check.
OF_CHECK = {"tokenizer", "revision", "dtype", "device", "device_map"}


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns its exit status, 0 if and only if it succeeded."""
    parser = _parser()
    # Completes names if it is installed; otherwise only completion is missing.
    with suppress(ImportError):
        import argcomplete

        argcomplete.autocomplete(parser)
    return carry_out(parser.parse_args(arguments))


def carry_out(options: argparse.Namespace) -> int:
    """Run a command; an error that ends it is printed in one line."""
    status = 1
    for stream in (sys.stdout, sys.stderr):
        # Characters that the terminal cannot show are printed as escapes.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        with open(os.devnull, "w") as nowhere:
            stderr = nowhere if options.quiet else sys.stderr
            with redirect_stderr(stderr), _notes():
                _refuse_empty(options)
                if options.requires:
                    require_extra(*options.requires)
                options.command(options)
        status = 0
        if sys.stdout:
            sys.stdout.flush()
    except BrokenPipeError:
        # Only the reader of the output, such as `head`, has gone; without this, Python would
        # complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    except KeyboardInterrupt as error:
        # The code that knows whether work is kept gives the message.
        print(str(error) or options.interrupted, file=sys.stderr)
        status = 130
    except Exception as error:
        if options.debug:
            raise
        if (
            isinstance(error, OSError)
            and not error.filename
            and error.errno in (errno.ENOSPC, errno.EIO)
        ):
            error = AnalysisError(
                f"standard output cannot be written ({error.strerror}): give another one"
            )
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        print(one_line(error), file=sys.stderr)
    return status


def _refuse_empty(options: argparse.Namespace) -> None:
    """Raise an AnalysisError for an option with an empty value, such as an unset shell variable."""
    for name, value in vars(options).items():
        if isinstance(value, str) and not value.strip():
            raise AnalysisError(
                f"--{name.replace('_', '-')} is empty: give a value, or leave it out"
            )


@contextmanager
def _notes() -> Iterator[None]:
    """A context in which notes of the library go to standard error, each once.

    Log settings of other libraries do not matter.
    """
    logger = logging.getLogger("analysis_lib")
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(Once())
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = True


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, like all others."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {AnalysisError(message)} (see `{self.prog} --help`)\n")


class _Help(argparse.HelpFormatter):
    """Wraps descriptions of commands, but keeps the lines of examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)


class Instead(argparse.Action):
    """An option that replaces required options and keeps the defaults of most others."""

    def __call__(
        self, parser: argparse.ArgumentParser, options: argparse.Namespace, value: str, *_: object
    ) -> None:
        setattr(options, self.dest, value)
        options.defaults = {action.dest: action.default for action in parser._actions}
        for action in parser._actions:
            action.required &= action.dest not in ("model", "data")


def whole(text: str) -> int:
    try:
        return whole_number(text)
    except ValueError:
        fault = "is no whole number, such as 100"
        if re.fullmatch("-?[0-9]+", text):
            fault = "has too many digits: give 18 at most"
        raise argparse.ArgumentTypeError(f"{text!r} {fault}") from None


def decimal(text: str) -> float:
    try:
        return decimal_number(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number, such as 0.001") from None


def part(text: str) -> tuple[int, int]:
    numbers = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
    number, count = map(int, numbers.groups()) if numbers else (0, 0)
    if not 1 <= number <= count:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no part: give its number, counted from 1, and how many there are, as in "
            "3/16"
        )
    return number, count


def folder(text: str) -> Path:
    if not text.strip():
        raise argparse.ArgumentTypeError("give the name of a folder")
    if (path := expanduser(text)).startswith("~"):
        raise argparse.ArgumentTypeError(f"there is no home folder {text.partition('/')[0]}")
    return Path(path)


# Options that several commands have.
DEVICE = {"help": "torch device; by default a GPU where there is one, for each worker the next one"}
WORKERS = {"type": whole, "default": 1, "help": "processes on this machine (default 1)"}
FORMAT = {
    "choices": ("parquet", "csv"),
    "default": "parquet",
    "help": "of the tables (default parquet)",
}


class Commands:
    """The commands of the command line, each with its options."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._common = argparse.ArgumentParser(add_help=False)
        self._common.add_argument(
            "--quiet", action="store_true", help="show no progress and no notes"
        )
        self._common.add_argument(
            "--debug", action="store_true", help="show the traceback of an error"
        )
        self._parsers = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(
        self,
        name: str,
        function: Callable[[argparse.Namespace], None],
        words: str,
        more: str = "",
        *examples: str,
        interrupted: str = "interrupted",
        requires: tuple[str, ...] = (),
    ) -> Callable[..., argparse.Action]:
        """Add a command; returns a function that adds its options, argparse's ``add_argument``.

        Args:
            words: its description in the list of commands.
            more: further sentences for its own help.
            examples: examples of its arguments, for its own help.
            interrupted: the message after a Ctrl-C, unless the work itself gives one.
            requires: an extra and the modules that it installs, as arguments of ``require_extra``.
        """
        shown = [f"  analysis-lib {name} {example}".rstrip() for example in examples or ("",)]
        parser = self._parsers.add_parser(
            name,
            parents=[self._common],
            help=words,
            description=f"{words[0].upper()}{words[1:]}. {more}",
            epilog="\n".join(["example:" if len(shown) == 1 else "examples:", *shown]),
            formatter_class=_Help,
        )
        parser.set_defaults(command=function, interrupted=interrupted, requires=requires)
        return parser.add_argument


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="analysis-lib",
        description="Measure the geometry of self-attention, and build the book about it.",
    )
    parser.add_argument("--version", action="version", version=f"analysis_lib {__version__}")
    commands = Commands(parser)
    command = commands.add

    def add_measurement(metrics: str) -> None:
        """Options that `measure` and `compare` share; ``metrics`` is a default."""
        known = (
            "one of `datasets`, table.csv:COLUMN (also TSV, JSONL, Parquet), lines.txt, a folder, "
            "or -"
        )
        add("--data", required=True, type=expanduser, help=known).completer = known_names
        names = [*catalogue()]
        known = (
            f"comma-separated, or all but what costs much (default {metrics}): {' '.join(names)}"
        )
        add("--metrics", default=metrics, help=known).completer = lambda **_: names
        add("--limit", type=whole, help="measure at most this many items, drawn at random")
        add("--seed", type=whole, help="with which they are drawn (default 0)")
        add(
            "--first",
            action="store_true",
            help="take the first --limit items instead of drawing them",
        )
        add(
            "--units",
            help="column of what each text is a part of, such as its document: intervals are "
            "over these",
        )
        add("--out", required=True, type=folder, help="folder for the tables and run.json")
        add("--format", **FORMAT)
        add("--dtype", **DTYPE)
        add("--tokenizer", **TOKENIZER)
        add(
            "--long-texts",
            default="cut",
            help="cut (default) long texts, or read them in windows (window)",
        )
        add(
            "--max-length",
            type=whole,
            metavar="N",
            help="tokens of a text that are read at once, in place of the model's own limit",
        )
        add(
            "--tokens",
            default="all",
            help="all (default), or those below a multiple of the median norm, as 'norm<10x'",
        )
        add(
            "--bins",
            help="every table by position (position: 1, 2, 3-4, 5-8, ...) or type of token (type)",
        )
        add(
            "--special-tokens",
            default="keep",
            help="keep (default) or drop [CLS] and [SEP] as vectors and queries",
        )
        add("--chat-template", **TEMPLATE)
        add(
            "--intervention",
            type=Path,
            metavar="FILE",
            help="YAML that says what is changed in the model on the way",
        )

    add = command(
        "measure",
        _measure,
        "measure a model on a corpus, as Parquet tables",
        "Every metric that the model and the corpus can have is measured in one pass; a table is a "
        "file, and run.json says what made them. What was measured before is found again.",
        "--model minilm --data wikipedia --limit 100 --out results/minilm",
        "--model path/to/model --data reviews.csv:text --format csv --out results/mine",
        "--model minilm --data wikipedia --part 3/16 --out results/parts",
        "--vectors path/to/states --layers 1,2,3 --check path/to/model --out results/states",
        interrupted=BEGINS_ANEW,
    )
    known = "a name listed by `models`, a Hub id, or a folder"
    add("--model", required=True, type=expanduser, help=known).completer = known_names
    given = (
        "a folder of vectors (safetensors, npy) that are measured instead of those of --model on "
        "--data"
    )
    add("--vectors", type=expanduser, action=Instead, help=given)
    ordered = (
        "which layers are in the files of --vectors, in order, where vLLM has written them: "
        "1,2,3, or final_3 for what is behind the last norm"
    )
    add("--layers", type=lambda text: text.split(","), metavar="1,2,3", help=ordered)
    compared = (
        "the model that vLLM ran: a few texts of --vectors are compared with it, to say which "
        "layers they really are; others than --layers are an error"
    )
    add("--check", type=expanduser, metavar="MODEL", help=compared).completer = known_names
    add_measurement("all")
    add("--workers", **WORKERS)
    cluster = (
        "a Dask cluster instead of --workers: tcp://HOST:PORT; where machines have several GPUs, "
        "start its workers with `dask cuda worker` of dask-cuda, which gives each a GPU"
    )
    add("--scheduler", help=cluster)
    idle = "seconds after which a cluster none of whose workers works is given up (default 60)"
    add("--worker-timeout", type=decimal, help=idle)
    share = (
        "measure the Nth of M parts of the corpus, as a job of an array does, and write its sums "
        "to a file in --out, where `merge` finds them"
    )
    add("--part", type=part, metavar="N/M", help=share)
    add("--revision", help="commit, branch or tag of a Hub model")
    add("--device", **DEVICE)
    add(
        "--device-map",
        help="auto: over the GPUs; what they cannot hold lies in memory, and then on disk, "
        "until used",
    )
    add(
        "--maps",
        default="flatten",
        help="vectors of a convolutional network: maps (flatten, default), or positions",
    )
    add("--tokens-per-batch", type=whole, default=2048, help="padding included (default 2048)")

    add = command(
        "merge",
        _merge,
        "merge the parts of a measurement, as tables in their folder",
        "The tables are those of `measure` without --part. Neither the model nor the corpus is "
        "read. Parts that are missing, or that are of another measurement, are named.",
        "results/parts",
    )
    add("folder", type=folder, metavar="DIR", help="the --out of `measure --part`")
    add("--format", **FORMAT)

    add = command(
        "compare",
        _compare,
        "measure models side by side, each with its untrained twins",
        "A table has the rows of all models; NAME_difference has what each has more than the first "
        "one, with intervals paired over texts.",
        "minilm smollm2-135m --data wikipedia --limit 100 --out results/both",
        interrupted=BEGINS_ANEW,
    )
    add(
        "models", nargs="+", metavar="MODEL", help="as --model of `measure`"
    ).completer = known_names
    add_measurement("anisotropy")
    add(
        "--twins",
        type=whole,
        default=1,
        help="untrained twins of each model, with other random weights (default 1)",
    )
    add("--workers", **WORKERS)
    add("--device", **DEVICE)

    add = command(
        "generate",
        _generate,
        "let a causal language model answer prompts, as JSON lines",
        "A line has the prompt, the answer, the ids of the tokens of both, and whether the model "
        "ended the answer by itself. Answers are those of transformers' generate.",
        "smollm2-135m --data prompts.csv:text --out answers.jsonl",
        "smollm2-135m --data prompts.txt --tokens 32 --temperature 0.7 --seed 1 --out drawn.jsonl",
        interrupted=BEGINS_ANEW,
    )
    known = "as --model of `measure`"
    add("model", type=expanduser, metavar="MODEL", help=known).completer = known_names
    known = "the prompts, as --data of `measure`"
    add("--data", required=True, type=expanduser, help=known).completer = known_names
    add("--out", required=True, type=expanduser, metavar="FILE", help="file for the answers")
    add("--tokens", type=whole, default=128, help="of an answer at most (default 128)")
    add(
        "--temperature",
        type=decimal,
        default=0.0,
        help="0 (default) takes the likeliest token; above, tokens are drawn",
    )
    add("--batch", type=whole, default=16, help="prompts that are answered at once (default 16)")
    add("--limit", type=whole, help="answer at most this many prompts, drawn at random")
    add("--seed", type=whole, help="with which prompts and tokens are drawn (default 0)")
    add(
        "--first",
        action="store_true",
        help="take the first --limit prompts instead of drawing them",
    )
    add("--chat-template", **TEMPLATE)
    add("--dtype", **DTYPE)
    add("--tokenizer", **TOKENIZER)
    add("--revision", help="commit, branch or tag of a Hub model")
    add("--device", **DEVICE)

    add = command(
        "cache",
        _cache,
        "say what is kept on disk, and clear it",
        "The packages that carry models and corpora stay.",
        "",
        "--clear measurements",
    )
    add(
        "--clear",
        choices=tuple(STORES),
        help="remove all of this; it is made again when it is needed",
    )
    command(
        "metrics",
        _metrics,
        "list the metrics",
        "Their names are what --metrics takes, separated by commas.",
    )
    command("models", _models, "list the models known by name", "They are what --model takes.")
    command("datasets", _datasets, "list the corpora known by name", "They are what --data takes.")
    for point in entry_points(group="analysis_lib.commands"):
        point.load()(commands)
    return parser


def _measure(options: argparse.Namespace) -> None:
    # Imported here: torch takes seconds to load, and `--help` and misspelt options should be fast.
    from analysis_lib import load_corpus, load_model, measure
    from analysis_lib.capture.inputs import Settings
    from analysis_lib.measurement.measuring import refuse_unavailable
    from analysis_lib.measurement.parts import Part
    from analysis_lib.measurement.tables import table_files
    from analysis_lib.metrics import resolve
    from analysis_lib.models.loading import checked_options

    if options.scheduler and options.workers != 1:
        raise AnalysisError("--workers and --scheduler exclude each other: give one of them")
    if options.scheduler:
        require_extra("cluster", "distributed")
    elif options.worker_timeout is not None:
        raise AnalysisError("--worker-timeout is of a cluster: give --scheduler, or leave it out")
    if options.part is not None and options.format != "parquet":
        raise AnalysisError("--format is of the tables that `merge` writes: give it there")
    if options.device_map is not None and options.device is not None:
        raise AnalysisError("--device and --device-map exclude each other: give one of them")
    # Misspelt names and folders of others are refused before anything is loaded.
    output = _output_of_measure(options)
    output.check(
        table_files(
            [metric.name for metric in resolve(options.metrics, options.bins)],
            output.last,
            options.format,
        )
    )
    if options.vectors is not None:
        _measure_vectors(options, output)
        return
    for name in ("layers", "check"):
        if getattr(options, name) is not None:
            raise AnalysisError(f"--{name} is of vectors: give --vectors, or leave it out")
    dtype = model_dtype(options, [options.model])
    checked_options(dtype, options.device, options.device_map)
    settings = _settings(options) | {
        "maps": options.maps,
        "tokens_per_batch": options.tokens_per_batch,
    }
    draw = _draw(options)
    corpus = load_corpus(options.data, **draw, units=options.units)
    given = Settings(**settings)
    refuse_unavailable(options.model, corpus, options.metrics, given, options.workers)
    # Parts are files of their own, so that many jobs may write at once.
    writer = made(output.folder) if options.part else sole_writer(output)
    with writer:
        given = {name: getattr(options, name) for name in ("revision", "device", "device_map")}
        work = {"workers": options.workers, "scheduler": options.scheduler}
        if options.worker_timeout is not None:
            work["worker_timeout"] = options.worker_timeout
        model = load_model(options.model, processor=options.tokenizer, dtype=dtype, **given)
        settings |= {"checkpoints": options.out, "bins": options.bins, **work}
        if options.part:
            whole_part = Part(*options.part, draw)
            tables = measure(model, corpus, options.metrics, part=whole_part, **settings)
            say(f"{whole_part}, {_read_by(tables)}, is in {options.out / whole_part.file}")
            return
        tables = measure(model, corpus, options.metrics, **settings)
        tables.run.update(draw)
        _save(tables, output, options.format)


def _measure_vectors(options: argparse.Namespace, output: "Output") -> None:
    from analysis_lib import measure_vectors

    kept = OF_VECTORS if options.check is None else OF_VECTORS | OF_CHECK
    refuse_others(options, kept, "--vectors are measured as they are")
    with sole_writer(output):
        check = None if options.check is None else _checked_layers(options)
        tables = measure_vectors(
            options.vectors,
            metrics=options.metrics,
            bins=options.bins,
            layers=options.layers,
            workers=options.workers,
            checkpoints=options.out,
        )
        if check is not None:
            tables.run["layer_check"] = check.described()
        _save(tables, output, options.format)


def _checked_layers(options: argparse.Namespace) -> "LayerCheck":
    """The layers of the model of --check that the vectors are, which is said in a line."""
    from analysis_lib import check_layers

    given = {name: getattr(options, name) for name in OF_CHECK}
    given["dtype"] = model_dtype(options, [options.check])
    check = check_layers(options.vectors, options.check, options.layers, **given)
    if options.layers is None:
        raise AnalysisError(
            f"{options.vectors}: the vectors are those of {check}: give --layers {check.argument}"
        )
    say(f"the vectors are those of {check}")
    return check


def _output_of_measure(options: argparse.Namespace) -> "Output":
    """The output folder, identified by the model, its changes, and the texts."""
    from analysis_lib.files import Output

    if options.vectors is not None:
        inputs = [options.vectors]
    else:
        inputs = [options.model, options.data]
        # The tables of parts are written by `merge`, which knows no more than these two.
        more = () if options.part else (options.revision, options.intervention)
        inputs += [given for given in more if given is not None]
    return Output(options.out, "measure", tuple(map(str, inputs)), "run.json")


def refuse_others(options: argparse.Namespace, kept: set[str], reason: str) -> None:
    """Raise an AnalysisError for options that an option of :class:`Instead` makes ineffective."""
    for name, default in options.defaults.items():
        if name not in kept and getattr(options, name, default) != default:
            called = "the models" if name == "models" else f"--{name.replace('_', '-')}"
            raise AnalysisError(f"{reason}: leave {called} out")


def model_dtype(options: argparse.Namespace, models: list[str]) -> str:
    """The precision of the models whose names give none.

    Raises:
        AnalysisError: ``--dtype`` is given, and no model would use it.
    """
    from analysis_lib.models import ModelName

    dtypes = [ModelName.parse(name).dtype for name in models]
    if options.dtype is not None and all(own not in (None, options.dtype) for own in dtypes):
        raise AnalysisError(
            f"every model names its own dtype, as {models[0]} does: leave --dtype out"
        )
    return options.dtype or "float32"


def _draw(options: argparse.Namespace, is_sampled: bool = False) -> dict[str, int | None]:
    """Arguments of ``load_corpus`` for the items to draw; without a seed, the first ones.

    Args:
        is_sampled: whether the seed draws something else, too.
    """
    seed = None if is_sampled else options.seed
    if options.first and seed is not None:
        raise AnalysisError("--first and --seed exclude each other: give one of them")
    if options.limit is None:
        for name, draws in (("--first", options.first), ("--seed", seed)):
            if draws:
                raise AnalysisError(
                    f"{name} says which items --limit keeps: give --limit, or leave it out"
                )
    seed = None if options.first else options.seed or 0
    return {"limit": options.limit, "seed": seed}


def say(line: str) -> None:
    """Print a line; a closed output is not an error, since the work is done."""
    with suppress(BrokenPipeError):
        print(line)


def _save(tables: "Tables", output: "Output", form: str) -> None:
    from analysis_lib.measurement.tables import save_tables

    save_tables(tables, output, tables.run, form)
    if tables.checkpoints is not None:
        with suppress(OSError):
            tables.checkpoints.unlink()
    say(f"wrote {count(len(tables), 'table')} of {_read_by(tables)} to {output.folder}")


def _read_by(tables: "Tables") -> str:
    report = tables.report
    return f"{count(report.tokens, 'token')} in {count(report.utterances, 'utterance')}"


def _merge(options: argparse.Namespace) -> None:
    from analysis_lib import merge_parts
    from analysis_lib.files import Output

    tables = merge_parts(options.folder)
    inputs = (tables.run["model"], tables.run["data"])
    output = Output(options.folder, "measure", inputs, "run.json")
    with sole_writer(output):
        _save(tables, output, options.format)


def _settings(options: argparse.Namespace) -> dict[str, object]:
    """Arguments of ``measure`` for reading texts and for interventions."""
    if options.special_tokens not in ("keep", "drop"):
        raise AnalysisError(f"--special-tokens is {options.special_tokens!r}: give keep or drop")
    return {
        "special_tokens": options.special_tokens == "keep",
        "long_texts": options.long_texts,
        "max_length": options.max_length,
        "tokens": options.tokens,
        "chat_template": _template(options.chat_template),
        "intervention": _intervention(options.intervention),
    }


def _template(path: Path | None) -> str | None:
    """The chat template in a file."""
    if path is None:
        return None
    if not path.is_file():
        raise AnalysisError(f"there is no file {path}: give one with a chat template in Jinja")
    from analysis_lib.corpora.reading import text_of

    return text_of(path)


def _intervention(path: Path | None) -> object:
    """The interventions in a file."""
    if path is None:
        return None
    from analysis_lib import files
    from analysis_lib.capture.interventions import interventions

    wanted = "give a mapping such as {where: residual, layers: [3], dimensions: [99]}, or a list"
    given = files.read_yaml(path, wanted)
    if not given:
        raise AnalysisError(
            f"{path} is empty: give a mapping such as {{where: residual, layers: [3]}}, or a list"
        )
    try:
        changes = interventions(given)
    except AnalysisError as error:
        raise AnalysisError(f"{path}: {error}") from error
    if not changes:
        raise AnalysisError(
            f"{path} changes nothing: give layers, tokens and dimensions that are changed"
        )
    return changes


def _compare(options: argparse.Namespace) -> None:
    from analysis_lib import compare
    from analysis_lib.files import Output
    from analysis_lib.measurement.tables import save_tables, table_files
    from analysis_lib.metrics import resolve

    names = [metric.name for metric in resolve(options.metrics, options.bins)]
    names += [f"{name}_difference" for name in names]
    inputs = [*options.models, options.data]
    if options.intervention is not None:
        inputs.append(str(options.intervention))
    output = Output(options.out, "compare", tuple(inputs), "run.json")
    output.check(table_files(names, output.last, options.format))
    settings = _settings(options)
    draw = _draw(options)
    settings |= draw | {name: getattr(options, name) for name in ("units", "twins", "tokenizer")}
    settings["dtype"] = model_dtype(options, options.models)
    settings |= {"workers": options.workers, "device": options.device, "bins": options.bins}
    with sole_writer(output):
        comparison = compare({options.data: options.models}, options.metrics, **settings)
        runs = [{"twin": twin, **tables.run} for (_, twin), tables in comparison.runs.items()]
        pairs = [tables.run for tables in comparison.similarities.values()]
        tables = dict(comparison)
        for name in comparison:
            difference = comparison.differences(name)
            if len(difference):
                tables[f"{name}_difference"] = difference
        described = draw | {"runs": runs}
        if pairs:
            described["pairs"] = pairs
        save_tables(tables, output, described, options.format)
    say(
        f"wrote {count(len(tables), 'table')} of {count(len(options.models), 'model')} to "
        f"{options.out}"
    )


def _generate(options: argparse.Namespace) -> None:
    from analysis_lib import generate, load_corpus, load_model
    from analysis_lib.measurement import save_answers
    from analysis_lib.models.loading import checked_options

    out = Path(options.out)
    if os.path.lexists(out):
        raise AnalysisError(f"{out} is there already: move it, or give another --out")
    if out.suffix not in (".jsonl", ".json"):
        raise AnalysisError(f"{out}: answers are JSON lines: give a name that ends in .jsonl")
    dtype = model_dtype(options, [options.model])
    checked_options(dtype, options.device)
    draw = _draw(options, is_sampled=options.temperature > 0)
    template = _template(options.chat_template)
    corpus = load_corpus(options.data, **draw)
    given = {name: getattr(options, name) for name in ("revision", "device")}
    with made(out.parent):
        model = load_model(options.model, processor=options.tokenizer, dtype=dtype, **given)
        answers = generate(
            model,
            corpus,
            max_new_tokens=options.tokens,
            temperature=options.temperature,
            seed=options.seed or 0,
            batch_size=options.batch,
            chat_template=template,
        )
        save_answers(answers, out)
    ended = sum(answer.ended for answer in answers)
    written = f"wrote {count(len(answers), 'answer')} of {model.name} to {out}"
    say(f"{written}; it ended {ended} of them by itself")


def count(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' * (number != 1)}"


def _metrics(options: argparse.Namespace) -> None:
    print_names({name: entry.summary for name, entry in catalogue().items()})


def _cache(options: argparse.Namespace) -> None:
    from analysis_lib import files, store

    for name, words in STORES.items():
        home = files.package_directory() / name
        kept = [*home.glob("*")]
        size = sum(
            path.stat().st_size
            for entry in kept
            for path in [entry, *entry.rglob("*")]
            if path.is_file()
        )
        print(
            f"{name:{max(map(len, STORES))}}  {size / 1e6:8.0f} MB in {len(kept):4} entries: "
            f"{words}"
        )
        if options.clear == name and home.is_dir():
            left = store.cleared(name)
            print(
                f"cleared {name}{', but for what is not ours: ' if left else ''}{', '.join(left)}"
            )
    print(f"in {files.package_directory()}")


def _models(options: argparse.Namespace) -> None:
    from analysis_lib.models import known_models

    print_names(known_models())
    print(
        "or a Hub id (owner/name), or a folder of save_pretrained; NAME:untrained is the same "
        "model, untrained"
    )


def _datasets(options: argparse.Namespace) -> None:
    from analysis_lib.corpora import known_corpora

    print_names(known_corpora())
    print(
        "or file.csv:COLUMN, a text file with one utterance per line, or a folder of images or "
        "sounds"
    )


def known_names(parsed_args: argparse.Namespace, action: argparse.Action, **_: object) -> list[str]:
    """Completions of a name on the command line."""
    from analysis_lib.corpora import known_corpora
    from analysis_lib.models import known_models

    return [
        name.partition(":")[0]
        for name in (known_corpora() if action.dest == "data" else known_models())
    ]


def print_names(names: dict[str, str]) -> None:
    width = max(map(len, names))
    for name, description in names.items():
        print(f"{name:{width}}  {description}")


@contextmanager
def made(folder: Path) -> Iterator[None]:
    """A context that fails at once if a folder cannot be written, before hours of work.

    Folders that it has made are removed at the end if they are empty.
    """
    # ``Path.exists`` raises an error of its own if a name is too long.
    new = [path for path in (folder, *folder.parents) if not os.path.exists(path)]
    try:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise AnalysisError(
                f"{folder} cannot be written ({reason}): give another --out"
            ) from error
        yield
    finally:
        with suppress(OSError, ValueError):
            for path in new:
                path.rmdir()


@contextmanager
def sole_writer(output: "Output") -> Iterator[None]:
    """A context that keeps a second run out of the folder, where the tables of both would mix."""
    with made(output.folder), output.alone():
        yield
