"""Execute the notebooks of the book with papermill, stage the pages, and build the site.

Papermill alone is not strict enough to publish from: it accepts a misspelt parameter, and after a
kernel has died it marks cells that never ran as completed. Here a notebook counts as executed only
if papermill ended well and every code cell has an execution count and no error output. Only then
does the copy replace the previous one, and only a site without a warning replaces the last good.
"""

import ast
import contextlib
import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import nbformat
import papermill
import yaml
from packaging.requirements import Requirement
from sphinx_external_toc.parsing import parse_toc_yaml
from tqdm import tqdm

from analysis_lib.corpora import packages
from analysis_lib.errors import AnalysisError, near_names

ROOT = Path(__file__).resolve().parents[2]
PROFILES = ("smoke", "default", "paper", "local")
TYPES = {"int": int, "float": float, "str": str, "bool": bool, "list": list}
THREAD_LIMITS = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "RAYON_NUM_THREADS",
)
# What a browser may ask MathJax for: the rest of its wheel is other outputs and sources.
MATHJAX_PARTS = ("tex-mml-chtml.js", "output/chtml", "input/tex", "a11y", "ui", "sre")

Parameters = Mapping[str, object]


# Parameters


@dataclass(frozen=True)
class Parameter:
    """A parameter that a notebook declares: its type is one of ``TYPES``, ``help`` its comment."""

    name: str
    type: str
    default: object
    help: str


def notebook_parameters(notebook: Path) -> dict[str, Parameter]:
    """The parameters of a notebook's cell tagged ``parameters``, in order.

    Raises:
        AnalysisError: the notebook cannot be read, or declares a parameter that is not a literal
            of type int, float, str, bool or list, in a form that papermill understands.
    """
    source = _parameters_cell(notebook)
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise AnalysisError(f"{notebook}: its parameters cell is no plain Python: {error.msg}") from None
    try:
        with _quiet("papermill"):
            inspected = papermill.inspect_notebook(str(notebook))
    except ValueError as error:
        raise AnalysisError(f"{notebook}: {error}; its metadata must name a kernelspec") from error
    declared = {
        target.id
        for node in tree.body
        for target in (getattr(node, "targets", None) or [getattr(node, "target", None)])
        if isinstance(target, ast.Name)
    }
    # Papermill passes over what it cannot read, for example a comment that holds an equals sign.
    for name in sorted(declared - set(inspected)):
        raise AnalysisError(
            f"{notebook}: papermill cannot read the parameter {name}; "
            "write `name: type = literal  # help` on one line, without another `=`"
        )
    return {name: _parameter(notebook, found) for name, found in inspected.items()}


def book_parameters(root: Path | None = None) -> dict[str, Parameter]:
    """Every parameter that some notebook of the book has, for ``coerce``.

    Raises:
        AnalysisError: two notebooks give one name different types.
    """
    root = root or ROOT
    union: dict[str, Parameter] = {}
    for name in _notebook_names(root):
        for parameter in notebook_parameters(root / "book" / f"{name}.ipynb").values():
            known = union.setdefault(parameter.name, parameter)
            if known.type != parameter.type:
                raise AnalysisError(
                    f"{name}: the parameter {parameter.name} is of type {parameter.type} here "
                    f"and {known.type} in another notebook; use one type"
                )
    return union


def coerce(values: Iterable[tuple[str, str]], spec: Mapping[str, Parameter]) -> dict[str, object]:
    """Command-line strings as values of the types that ``spec`` gives.

    A list is written ``3,6`` or ``[3, 6]``.

    >>> coerce([("layers", "3,6")], {"layers": Parameter("layers", "list", [1], "")})
    {'layers': [3, 6]}

    Raises:
        AnalysisError: an unknown name, or a string that is no value of its type.
    """
    values = list(values)
    _refuse_unknown((name for name, _ in values), spec, "this notebook")
    return {name: _typed(text, spec[name]) for name, text in values}


def _parameters_cell(notebook: Path) -> str:
    for cell in _read(notebook).cells:
        if "parameters" in cell.metadata.get("tags", []):
            return cell.source
    return ""


def _parameter(notebook: Path, found: Mapping[str, str]) -> Parameter:
    name, annotation = found["name"], found["inferred_type_name"]
    try:
        default = ast.literal_eval(found["default"])
    except (ValueError, SyntaxError):
        raise AnalysisError(
            f"{notebook}: the default of parameter {name} is not a literal: {found['default']}"
        ) from None
    kind = type(default).__name__ if annotation == "None" else annotation.partition("[")[0]
    parameter = Parameter(name, kind, default, found["help"])
    if kind not in TYPES:
        raise AnalysisError(f"{notebook}: parameter {name} has type {kind}; use {', '.join(TYPES)}")
    _check_value(default, parameter)
    return parameter


def _refuse_unknown(names: Iterable[str], known: Iterable[str], where: str) -> None:
    known = list(known)
    for name in names:
        if name not in known:
            hint = near_names(name, known) if known else "it has no parameters"
            raise AnalysisError(f"{where} has no parameter {name}: {hint}")


def _typed(text: str, parameter: Parameter) -> object:
    try:
        if parameter.type == "list":
            return _typed_list(text, parameter)
        return _scalar(text, TYPES[parameter.type])
    except (ValueError, yaml.YAMLError):
        raise AnalysisError(_misfit(text, parameter)) from None


def _typed_list(text: str, parameter: Parameter) -> list:
    """Items are of the type of the default's, or what YAML takes them for if it is empty."""
    items = yaml.load(text if text.startswith("[") else f"[{text}]", yaml.BaseLoader)
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise ValueError
    kinds = {type(item) for item in parameter.default}
    if len(kinds) == 1:
        return [_scalar(item, *kinds) for item in items]
    values = [yaml.safe_load(item) for item in items]
    # YAML also knows dates and more, which no parameter is.
    return [value if isinstance(value, int | float | str) else item for value, item in zip(values, items, strict=True)]


def _scalar(text: str, kind: type) -> object:
    if kind is bool:
        value = yaml.safe_load(text)
        if not isinstance(value, bool):
            raise ValueError
        return value
    return kind(text)


def _check_value(value: object, parameter: Parameter) -> None:
    kind = TYPES[parameter.type]
    whole_for_float = kind is float and type(value) is int
    if type(value) is not kind and not whole_for_float:
        raise AnalysisError(_misfit(value, parameter))


def _misfit(value: object, parameter: Parameter) -> str:
    return (
        f"parameter {parameter.name} wants a value of type {parameter.type}, "
        f"such as {parameter.default!r}, and got {value!r}"
    )


# One notebook


def run_notebook(
    notebook: Path,
    parameters: Parameters,
    out: Path,
    *,
    key: str = "",
    threads: int | None = None,
    on_cell: Callable[[], None] = lambda: None,
    stop: threading.Event | None = None,
) -> Path:
    """Execute ``notebook`` with ``parameters`` and write the executed copy to ``out``.

    The kernel is this interpreter, works in the current folder and uses ``threads`` cores (all of
    them unless said otherwise). ``on_cell`` is called after each code cell; setting ``stop`` ends
    the run. ``key`` is kept in the copy, for :func:`build_book` to know it by.

    Raises:
        AnalysisError: a parameter that the notebook lacks or of another type, or a run that did not
            finish: then ``out`` is as it was.
    """
    spec = notebook_parameters(notebook)
    _refuse_unknown(parameters, spec, str(notebook))
    for name, value in parameters.items():
        _check_value(value, spec[name])
    final = {name: spec[name].default for name in spec} | dict(parameters)
    changed = {name: value for name, value in final.items() if value != spec[name].default}

    if out.is_dir() or (out.exists() and out.samefile(notebook)):
        raise AnalysisError(f"the executed copy would replace {out}: give another --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".unfinished-") as scratch:
        draft = Path(scratch) / out.name
        job = {"notebook": str(notebook), "output": str(draft), "parameters": changed}
        status, log = _work(job, Path(scratch), threads or _cores(), on_cell, stop)
        _refuse_unfinished(notebook, final, draft, status, log)
        _sign(draft, final, key)
        os.replace(draft, out)
    return out


def _work(
    job: dict,
    scratch: Path,
    threads: int,
    on_cell: Callable[[], None],
    stop: threading.Event | None,
) -> tuple[int, list[str]]:
    """Run the worker to its end; its exit status and the last lines of its log."""
    environment = os.environ | dict.fromkeys(THREAD_LIMITS, str(threads))
    environment["JUPYTER_PATH"] = str(_kernelspec(scratch))
    # A notebook that is executed unseen needs no widgets, and the warning that it has none would carry our paths.
    environment["PYTHONWARNINGS"] = "ignore:IProgress not found"
    # Nothing of the user's own set-up enters a result, and nothing of a run stays behind.
    environment |= dict.fromkeys(("IPYTHONDIR", "JUPYTER_RUNTIME_DIR"), str(scratch))
    log: deque[str] = deque(maxlen=40)
    process = subprocess.Popen(
        # -P keeps the folder of the script out of the path, where our names would hide others'.
        [sys.executable, "-P", str(Path(__file__).with_name("worker.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        # Whatever a library writes there is a log.
        errors="replace",
        env=environment,
        # Ctrl-C reaches this process only, which then ends the worker.
        start_new_session=True,
    )
    process.stdin.write(json.dumps(job) + "\n")
    process.stdin.flush()
    if stop:
        threading.Thread(target=_end_on, args=(stop, process), daemon=True).start()
    try:
        for line in process.stdout:
            if line == "cell\n":
                on_cell()
            else:
                log.append(line.rstrip())
        return process.wait(), list(log)
    finally:
        _end(process)


def _kernelspec(folder: Path) -> Path:
    """A Jupyter data folder whose ``python3`` is this interpreter, whatever else is installed."""
    spec = {
        "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": "Python 3 (ipykernel)",
        "language": "python",
    }
    home = folder / "kernels" / "python3"
    home.mkdir(parents=True)
    (home / "kernel.json").write_text(json.dumps(spec), encoding="utf-8")
    return folder


def _end_on(stop: threading.Event, process: subprocess.Popen) -> None:
    while process.poll() is None:
        if stop.wait(0.2):
            return _end(process)


def _end(process: subprocess.Popen) -> None:
    """End the worker, if it has not ended: its kernel sees that within a second and ends too."""
    process.kill()
    process.wait()
    process.stdin.close()


def _refuse_unfinished(notebook: Path, parameters: Parameters, draft: Path, status: int, log: list[str]) -> None:
    """Raise, with what a reader needs to find the fault, unless every code cell was executed."""
    cells = [cell for cell in _read(draft).cells if _authored(cell)] if draft.exists() else []
    bad = [(n, cell) for n, cell in enumerate(cells, 1) if not _executed(cell)]
    if status == 0 and cells and not bad:
        return
    number, cell = _culprit(cells, bad)
    where = f"cell {number}: {_first_line(cell)}" if cell else "before its first cell"
    told = _traceback(cell) if cell else []
    tail = told or [line for line in log if line.strip() and status] or ["it was not executed"]
    raise AnalysisError(
        "\n".join(
            [
                f"{notebook} failed in {where}",
                f"  parameters: {_told(parameters) or 'none'}",
                *(f"  {line}" for line in tail[-6:]),
            ]
        )
    )


def _authored(cell: nbformat.NotebookNode) -> bool:
    """Whether the cell is the author's: papermill adds the parameters and marks of an error."""
    added = {"injected-parameters", "papermill-error-cell-tag"}
    return not added & set(cell.metadata.get("tags", []))


def _executed(cell: nbformat.NotebookNode) -> bool:
    if cell.cell_type != "code" or not cell.source.strip():
        return True
    return cell.execution_count is not None and not _errors(cell)


def _errors(cell: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [output for output in cell.outputs if output.output_type == "error"]


def _culprit(cells: list, bad: list) -> tuple[int, nbformat.NotebookNode | None]:
    """The cell with an error; else the last that began, as when its kernel died; else one unrun."""
    with_error = [(n, cell) for n, cell in bad if _errors(cell)]
    begun = [
        (n, cell)
        for n, cell in enumerate(cells, 1)
        if cell.cell_type == "code" and cell.metadata.get("papermill", {}).get("start_time")
    ]
    ended = len(begun) == sum(cell.cell_type == "code" for cell in cells)
    order = with_error or (bad if ended and bad else begun[-1:]) or [(0, None)]
    return order[0]


def _traceback(cell: nbformat.NotebookNode) -> list[str]:
    text = "\n".join(line for error in _errors(cell) for line in error.traceback)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return [line.rstrip() for line in plain.splitlines() if line.strip()]


def _first_line(cell: nbformat.NotebookNode) -> str:
    return next((line for line in cell.source.splitlines() if line.strip()), "")


def _sign(draft: Path, parameters: Parameters, key: str) -> None:
    """Say in the copy what it is, and take out the paths of the machine that it was made on."""
    notebook = _read(draft)
    told = notebook.metadata.pop("papermill", {})
    notebook.metadata["analysis_lib"] = {
        "key": key,
        "parameters": dict(parameters),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(told.get("duration") or 0.0, 1),
    }
    nbformat.write(notebook, draft)


# The book


def build_book(
    profile: str = "default",
    parameters: Parameters | None = None,
    root: Path | None = None,
    out: Path | None = None,
) -> Path:
    """Execute what is not up to date, then build the site; the path of its first page.

    ``parameters`` go over those of the profile, to every notebook that has them. ``out`` is the
    folder of the site, ``_build/html`` unless said otherwise.

    Raises:
        AnalysisError: a parameter that no notebook has, a notebook that failed (the others are
            finished and kept), or a site with a warning: then the last good site is as it was.
        KeyboardInterrupt: with what was kept as its message; nothing is half-written.
    """
    root = (root or ROOT).resolve()
    out = out or root / "_build" / "html"
    tasks = _tasks(root, profile, parameters or {})
    _execute([task for task in tasks if not task.up_to_date])
    build = root / "_build"
    with tempfile.TemporaryDirectory(dir=build, prefix=".stage-") as scratch:
        stage = Path(scratch) / "stage"
        _stage(root, profile, tasks, stage)
        key = _digest(_files(stage), installed(), packages.fingerprint("django-static-mathjax"))
        if not _is_built(out, key):
            site = _sphinx(stage, Path(scratch) / "site", build / "build.log")
            (site / ".key").write_text(key, encoding="utf-8")
            _swap(site, out)
    return out / "index.html"


@dataclass(frozen=True)
class _Task:
    """One notebook to have executed: ``final`` are its parameters, defaults among them."""

    name: str
    notebook: Path
    given: Parameters
    final: Parameters
    out: Path
    key: str

    @property
    def up_to_date(self) -> bool:
        if not self.out.exists():
            return False
        try:
            return _read(self.out).metadata.get("analysis_lib", {}).get("key") == self.key
        except AnalysisError:
            return False


def _notebook_names(root: Path) -> list[str]:
    """The notebooks of the table of contents: paths below ``book`` without suffix, in order."""
    toc = root / "_toc.yml"
    if not toc.exists():
        raise AnalysisError(f"no book in {root}: run this in a clone of the repository")
    documents = (str(Path(name)) for name in parse_toc_yaml(toc))
    return [name for name in documents if (root / "book" / f"{name}.ipynb").exists()]


def _tasks(root: Path, profile: str, parameters: Parameters) -> list[_Task]:
    names = _notebook_names(root)
    specs = {name: notebook_parameters(root / "book" / f"{name}.ipynb") for name in names}
    every = {parameter for spec in specs.values() for parameter in spec}
    settings = _profile(root, profile)
    _refuse_unknown(parameters, every, "the book")
    _refuse_unknown(settings.get("all") or {}, every, f"profile {profile}: the book")
    for name in settings.keys() - {"all", *names}:
        raise AnalysisError(f"profile {profile} names no notebook: {near_names(name, names)}")
    ground = _digest(_library(root), installed())
    return [_task(root, profile, name, specs[name], settings, parameters, ground) for name in names]


def _task(
    root: Path,
    profile: str,
    name: str,
    spec: Mapping[str, Parameter],
    settings: dict,
    parameters: Parameters,
    ground: str,
) -> _Task:
    own = settings.get(name) or {}
    _refuse_unknown(own, spec, f"profile {profile}: {name}")
    shared = {k: v for k, v in (settings.get("all") or {}).items() if k in spec}
    given = shared | own | {k: v for k, v in parameters.items() if k in spec}
    for parameter, value in given.items():
        _check_value(value, spec[parameter])
    final = {k: given.get(k, spec[k].default) for k in spec}
    notebook = root / "book" / f"{name}.ipynb"
    out = root / "_build" / "executed" / profile / f"{name}.ipynb"
    key = _digest(_code(notebook), final, _inputs(final), ground)
    return _Task(name, notebook, given, final, out, key)


def _profile(root: Path, profile: str) -> dict:
    if profile not in PROFILES:
        raise AnalysisError(f"no profile {profile}: {near_names(profile, PROFILES)}")
    path = root / "book" / "parameters" / f"{profile}.yml"
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, yaml.YAMLError) as error:
        raise AnalysisError(f"cannot read the profile {path}: {error}") from error
    if base := settings.pop("extends", None):
        below = _profile(root, base)
        settings = {name: {**below.get(name, {}), **settings.get(name, {})} for name in below | settings}
    return settings


def _inputs(parameters: Parameters) -> dict[str, str]:
    """What the parameters name consists of: ``model``, ``..._models``, ``run``, ``runs``, ``data``, ``..._data``."""
    from analysis_lib import corpora, models
    from analysis_lib.papers.godey import dynamics

    found = {}
    for name, value in parameters.items():
        if name == "model" or name.endswith("models"):
            for model in [value] if isinstance(value, str) else value:
                found[f"model {model}"] = models.fingerprint(model)
        if name in ("run", "runs"):
            for run in [value] if isinstance(value, str) else value:
                found[f"run {run}"] = dynamics.fingerprint(run)
        if name == "data" or name.endswith("_data"):
            # Before any kernel starts: every notebook would stop at the same mistake.
            corpora.check_draw(parameters.get("limit"), parameters.get("seed"))
            for spec in [value] if isinstance(value, str) else value:
                found[f"{name} {spec}"] = corpora.fingerprint(spec)
    return found


def _execute(tasks: list[_Task]) -> None:
    """Execute notebooks side by side, one to a core; report all failures after the last ended."""
    if not tasks:
        return
    parallel = min(_cores(), len(tasks))
    stop, failures, done = threading.Event(), [], 0
    cells = sum(_code_cells(task.notebook) for task in tasks)
    bar = tqdm(total=cells, unit="cell", desc="notebooks")
    with bar, ThreadPoolExecutor(parallel) as pool:
        futures: dict[Future, _Task] = {
            pool.submit(
                run_notebook,
                task.notebook,
                task.given,
                task.out,
                key=task.key,
                threads=max(1, _cores() // parallel),
                on_cell=bar.update,
                stop=stop,
            ): task
            for task in tasks
        }
        try:
            for future in as_completed(futures):
                if isinstance(future.exception(), AnalysisError):
                    failures.append(future.exception())
                else:
                    future.result()
                    done += 1
                    bar.write(f"executed {futures[future].name}", file=sys.stderr)
        except BaseException as error:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            if isinstance(error, KeyboardInterrupt):
                raise KeyboardInterrupt(_interrupted(done, len(tasks))) from None
            raise
    if failures:
        raise AnalysisError("\n".join(str(failure) for failure in failures))


def _interrupted(done: int, total: int) -> str:
    return f"interrupted: {done} of {total} notebooks are executed and kept; run again to go on"


def _code_cells(notebook: Path) -> int:
    return sum(cell.cell_type == "code" and cell.source.strip() != "" for cell in _read(notebook).cells)


# Freshness


def _digest(*parts: object) -> str:
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _files(folder: Path) -> dict[str, str]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def _library(root: Path) -> dict[str, dict[str, str]]:
    sources = _files(Path(__file__).parents[1])
    return {
        "sources": {name: value for name, value in sources.items() if name.endswith(".py")},
        "reference": _files(root / "data" / "reference"),
        "measurements": _files(root / "data" / "measurements"),
    }


def _code(notebook: Path) -> list:
    """All of a notebook but its outputs: prose and captions are in the executed copy too."""
    cells = _read(notebook).cells
    return [[cell.cell_type, cell.source, cell.metadata] for cell in cells]


@functools.cache
def installed() -> dict[str, str]:
    """The version of every package of the environment, by name."""
    found = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def _is_built(site: Path, key: str) -> bool:
    with contextlib.suppress(OSError):
        return (site / ".key").read_text(encoding="utf-8") == key
    return False


# The site


def _stage(root: Path, profile: str, tasks: list[_Task], stage: Path) -> None:
    """Pages, executed notebooks, configuration and the status page, as one folder for Sphinx."""
    leave = shutil.ignore_patterns("*.ipynb", "parameters", ".ipynb_checkpoints")
    shutil.copytree(root / "book", stage, ignore=leave)
    for task in tasks:
        copy = stage / f"{task.name}.ipynb"
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(task.out, copy)
    for name in ("_config.yml", "_toc.yml"):
        shutil.copy(root / name, stage)
    (stage / "status.md").write_text(_status(profile, tasks), encoding="utf-8")


def _status(profile: str, tasks: list[_Task]) -> str:
    """The page that says what was executed, when, with which parameters and versions."""
    rows = [_status_row(task) for task in tasks]
    system = f"{platform.system()} on {platform.machine()}"
    return "\n".join(
        [
            "(status)=",
            "# Execution status",
            "",
            f"Every notebook below was executed in the profile `{profile}`, on "
            f"Python {platform.python_version()} and {system}. The key stands for the notebook's "
            "code, its parameters, the library, the model, the data and the installed versions: "
            "a notebook is executed again when its key changes.",
            "",
            "```{list-table} Executed notebooks",
            ":name: tab-status",
            ":header-rows: 1",
            "",
            *_list_row(["notebook", "parameters", "seconds", "finished (UTC)", "key"]),
            *(line for row in rows for line in _list_row(row)),
            "```",
            "",
            "```{list-table} Versions of the packages that the book uses",
            ":name: tab-versions",
            ":header-rows: 1",
            "",
            *_list_row(["package", "version"]),
            *(line for row in _direct_versions() for line in _list_row(row)),
            "```",
            "",
        ]
    )


def _status_row(task: _Task) -> list[str]:
    told = _read(task.out).metadata["analysis_lib"]
    finished = datetime.fromisoformat(told["finished"]).strftime("%Y-%m-%d %H:%M")
    parameters = ", ".join(f"`{name} = {value!r}`" for name, value in task.final.items())
    return [
        f"{{doc}}`{task.name}`",
        parameters or "none",
        f"{told['seconds']:.0f}",
        finished,
        f"`{task.key[:12]}`",
    ]


def _list_row(cells: Iterable[str]) -> list[str]:
    first, *rest = cells
    return [f"* - {first}", *(f"  - {cell}" for cell in rest)]


def _direct_versions() -> list[tuple[str, str]]:
    wanted = [Requirement(line) for line in importlib.metadata.requires("analysis_lib") or []]
    names = [requirement.name for requirement in wanted if not requirement.marker]
    return [(name, importlib.metadata.version(name)) for name in names]


def _sphinx(stage: Path, target: Path, log: Path) -> Path:
    """Build the staged book, any warning being an error; the folder of the site.

    Raises:
        AnalysisError: with the warnings.
    """
    command = [sys.executable, "-c", "from jupyter_book.cli.main import main; main()", "build"]
    command += [str(stage), "-n", "-W", "--keep-going", "--path-output", str(target)]
    with log.open("w", encoding="utf-8") as chatter, tqdm(desc="site", unit="page") as bar:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
        )
        try:
            for line in process.stdout:
                chatter.write(line)
                bar.update("writing output" in line)
            status = process.wait()
        finally:
            _end(process)
    site = target / "_build" / "html"
    if status or not (site / "index.html").exists():
        raise AnalysisError(_complaints(log, stage))
    _add_mathjax(site / "_static" / "mathjax")
    _add_downloads(site / "_sources")
    return site


def _complaints(log: Path, stage: Path) -> str:
    """Sphinx's warnings, with the paths a reader knows, or its last lines."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", log.read_text(encoding="utf-8"))
    lines = text.replace(f"{stage}/", "book/").splitlines()
    wanted = [line for line in lines if "WARNING" in line or "ERROR" in line] or lines[-10:]
    return "\n".join([f"the site was not built (all of the log: {log}):", *dict.fromkeys(wanted)])


def _add_mathjax(target: Path) -> None:
    source = packages.extracted("django-static-mathjax", "mathjax/static/mathjax/es5/")
    for part in MATHJAX_PARTS:
        copy = shutil.copytree if (source / part).is_dir() else shutil.copy
        target.mkdir(parents=True, exist_ok=True)
        copy(source / part, target / part)


def _add_downloads(sources: Path) -> None:
    """Each notebook again as a script that saves it: see ``book/_static/download.js``."""
    for notebook in sources.rglob("*.ipynb"):
        arguments = map(json.dumps, (notebook.name, notebook.read_text(encoding="utf-8")))
        script = f"saveNotebook({', '.join(arguments)});\n"
        notebook.with_name(f"{notebook.name}.js").write_text(script, encoding="utf-8")


def _swap(site: Path, out: Path) -> None:
    """Put the new site in the place of the old with two renames, so that none is half-written."""
    out.parent.mkdir(parents=True, exist_ok=True)
    old = site.parent / "replaced"
    if out.exists():
        os.rename(out, old)
    os.rename(site, out)


# Small helpers


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _read(notebook: Path) -> nbformat.NotebookNode:
    try:
        return nbformat.read(notebook, as_version=4)
    except FileNotFoundError:
        raise AnalysisError(f"there is no notebook {notebook}") from None
    except (OSError, ValueError, AttributeError, TypeError, KeyError, nbformat.ValidationError) as error:
        reason = str(error).split("\n")[0]
        raise AnalysisError(f"{notebook} cannot be read as a notebook: {reason}") from error


def _told(parameters: Parameters) -> str:
    return ", ".join(f"{name} = {value!r}" for name, value in parameters.items())


@contextlib.contextmanager
def _quiet(logger: str) -> Iterator[None]:
    """Its warnings would come twice: what they tell of is refused here."""
    log = logging.getLogger(logger)
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
