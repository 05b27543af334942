"""The book: execute its notebooks, stage the pages, build the site.

Only a site that Sphinx builds without a warning replaces the last good one.
"""

import asyncio
import importlib.metadata
import itertools
import platform
import re
import shutil
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import nbformat

from analysis_book.build.freshness import installed, notebook_key
from analysis_book.build.notebook import carried_out, cores, execute
from analysis_book.build.parameters import ROOT, Parameters, read_notebook, resolve
from analysis_book.build.sharing import to_share
from analysis_book.build.watching import watched
from analysis_book.sources import NAME, book_hash
from analysis_lib import files, store
from analysis_lib.errors import AnalysisError
from analysis_lib.files import Output
from analysis_lib.store import library_hash

# What the wheel of the site leaves out of shipped runs, by file.
LARGE_TABLES = "vectors.parquet", "head_means.parquet"
# Files of the theme that no page asks for, seven megabytes: source maps, fonts for browsers that
# know no WOFF2, and what its translations are made from.
UNREAD = "*.map", "*.ttf", "*.po", "*.mo"


@dataclass(frozen=True)
class Task:
    """One notebook to execute, with the values of all its parameters."""

    name: str
    notebook: Path
    parameters: Parameters
    out: Path
    key: str

    @property
    def up_to_date(self) -> bool:
        try:
            return read_notebook(self.out).metadata.get("analysis_lib", {}).get("key") == self.key
        except AnalysisError:
            return False


def require_jupyter_book() -> None:
    """Refuse, before anything is measured, to build a site without Jupyter Book 1."""
    try:
        version = importlib.metadata.version("jupyter-book")
    except importlib.metadata.PackageNotFoundError:
        version = "none"
    if version.partition(".")[0] != "1":
        raise AnalysisError(
            f"Jupyter Book 1 builds the site, and {version} is installed: run pip install "
            "'jupyter-book<2'"
        )


def build_book(
    profile: str = "default",
    parameters: Parameters | None = None,
    root: Path = ROOT,
    out: Path | None = None,
) -> Path:
    """Execute the notebooks that are not up to date, and build the site.

    ``parameters`` override those of the profile, in every notebook that has them. ``out`` is the
    folder of the site, ``_build/html`` unless given.

    Where another process builds the same book, this one waits for it, and executes what that has
    left.

    Returns:
        The path of the first page.

    Raises:
        AnalysisError: no Jupyter Book 1; an unknown parameter, a notebook that failed (the others
            are finished and kept), or a site with a warning; the last good site is then left as it
            was.
        KeyboardInterrupt: its message says what was kept; nothing is half-written.
    """
    require_jupyter_book()
    started = time.monotonic()
    root = root.resolve()
    build = root / "_build"
    out = out or build / "html"
    site = Output(out, "book", (), "index.html")
    _refuse_foreign(site)
    with files.alone(
        build / ".lock", "the book is being built by another process: waiting for that one to end"
    ):
        tasks = _tasks(root, profile, parameters or {})
        stale = [task for task in tasks if not task.up_to_date]
        try:
            carried_out(_execute(stale))
        except KeyboardInterrupt:
            kept = sum(task.up_to_date for task in stale)
            raise KeyboardInterrupt(
                f"interrupted: {kept} of {len(stale)} notebooks are executed and kept; run the "
                "command again to continue"
            ) from None
        _build_site(root, profile, tasks, site)
    print(_summary(tasks, stale, time.monotonic() - started), file=sys.stderr)
    return out / "index.html"


def _tasks(root: Path, profile: str, parameters: Parameters) -> list[Task]:
    """The notebooks of the book with the values of all their parameters."""
    tasks = []
    for name, values in resolve(profile, parameters, root).items():
        notebook = root / "book" / f"{name}.ipynb"
        executed = root / "_build" / "executed" / profile / f"{name}.ipynb"
        key = notebook_key(notebook, values, root)
        tasks.append(Task(name, notebook, values, executed, key))
    return tasks


def _refuse_foreign(site: Output) -> None:
    try:
        site.check([site.last])
    except AnalysisError as error:
        raise AnalysisError(
            f"the site cannot be replaced ({error}; `make clean` removes the whole build)"
        ) from error


def _build_site(root: Path, profile: str, tasks: list[Task], site: Output) -> None:
    """Build the site of executed notebooks, unless it is there."""
    site.folder.mkdir(parents=True, exist_ok=True)
    with files.scratch(site.folder, ".stage") as scratch:
        stage = scratch / "stage"
        _stage(root, tasks, stage)
        claims = files.hashes_of(files.data_directory() / "claims")
        # What the wheel of the site is made of.
        folders = files.hashes_of(root / "analysis_lib"), files.hashes_of(root / "book")
        sources = library_hash(), book_hash(), *folders
        key = store.key(
            files.hashes_of(stage), claims, profile, platform.python_version(), installed(), sources
        )
        stamp = site.folder / ".key"
        if not stamp.is_file() or stamp.read_text(encoding="utf-8") != key:
            if (root / "pyproject.toml").is_file():
                _add_wheel(root, scratch / "wheel", stage / "_static")
            print("building the site", file=sys.stderr, flush=True)
            new = _sphinx(stage, scratch / "site", root / "_build" / "build.log")
            (new / ".key").write_text(key, encoding="utf-8")
            site.replace(new)


def _summary(tasks: list[Task], stale: list[Task], seconds: float) -> str:
    """The number of notebooks that were executed, the slowest of them, and the time of all."""
    took = {}
    for task in stale:
        took[task.name] = read_notebook(task.out).metadata["analysis_lib"]["seconds"]
    slowest = sorted(took, key=took.get, reverse=True)[:5]
    line = (
        f"executed {len(stale)} of {len(tasks)} notebooks in {seconds:.0f} s; the others were "
        "up to date"
    )
    if slowest:
        line += f"; slowest: {', '.join(f'{name} {took[name]:.0f} s' for name in slowest)}"
    return line


async def _execute(tasks: list[Task]) -> None:
    """Execute notebooks side by side, one to a core.

    All failures are reported after the last one has ended. Each core has a stretch of the book; one
    that is through takes over from the end of the longest.
    """
    parallel = max(1, min(cores(), len(tasks)))
    # Neighbours in the book measure or train the same: side by side, one would wait for the other.
    ends = [len(tasks) * i // parallel for i in range(parallel + 1)]
    stretches = [deque(tasks[start:end]) for start, end in itertools.pairwise(ends)]
    failures = []
    threads = max(1, cores() // parallel)
    cells = 0
    for task in tasks:
        cells += sum(cell.cell_type == "code" for cell in read_notebook(task.notebook).cells)
    async with watched([task.name for task in tasks], cells, cores()) as watch:

        async def one_by_one(stretch: deque[Task]) -> None:
            while rest := stretch or max(stretches, key=len):
                task = rest.popleft() if rest is stretch else rest.pop()
                line_file = watch.begin(task.name)
                try:
                    await execute(
                        task.notebook,
                        task.parameters,
                        task.out,
                        task.key,
                        threads,
                        watch.cell_ends,
                        line_file,
                    )
                    watch.end(task.name)
                except AnalysisError as error:
                    failures.extend(error.args)
                line_file.unlink()

        await asyncio.gather(*map(one_by_one, stretches))
    if failures:
        raise AnalysisError(*dict.fromkeys(failures))


def _stage(root: Path, tasks: list[Task], stage: Path) -> None:
    """Pages, executed notebooks and configuration, as one folder for Sphinx."""
    leave = shutil.ignore_patterns(
        "*.ipynb", NAME, "parameters", ".ipynb_checkpoints", "__pycache__"
    )
    shutil.copytree(root / "book", stage, ignore=leave)
    for task in tasks:
        (stage / task.name).parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(to_share(read_notebook(task.out)), stage / f"{task.name}.ipynb")
    for name in ("_config.yml", "_toc.yml"):
        shutil.copy(root / name, stage)


def _add_wheel(root: Path, scratch: Path, target: Path) -> None:
    """The library as a wheel that the site brings along, with the versions that it needs.

    It is without the weights of the small models, which it trains where they are asked for, and
    without the vectors and mean vectors of runs: together they would weigh more than the pages.
    """
    leave = shutil.ignore_patterns(
        "packages", "models", *LARGE_TABLES, "__pycache__", ".ipynb_checkpoints"
    )
    for name in ("analysis_lib", "data", "book"):
        keep = shutil.ignore_patterns("__pycache__") if name == "analysis_lib" else leave
        shutil.copytree(root / name, scratch / name, ignore=keep)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "_config.yml"):
        shutil.copy(root / name, scratch)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--disable-pip-version-check",
        "--quiet",
        "--no-deps",
    ]
    done = subprocess.run(
        [*pip, "--no-build-isolation", "-w", target, scratch], capture_output=True, text=True
    )
    if done.returncode:
        raise AnalysisError("the wheel for the site was not built:", *done.stderr.splitlines()[-3:])
    shutil.copy(root / "constraints.txt", target)


def _sphinx(stage: Path, target: Path, log: Path) -> Path:
    """Build the staged book and return the folder of the site, which is refused if Sphinx warns."""
    command = [sys.executable, "-c", "from jupyter_book.cli.main import main; main()", "build"]
    command += [str(stage), "-n", "-W", "--keep-going", "--path-output", str(target)]
    with log.open("wb") as chatter:
        done = subprocess.run(command, stdout=chatter, stderr=subprocess.STDOUT, check=False)
    site = target / "_build" / "html"
    if done.returncode or not (site / "index.html").exists():
        raise AnalysisError(*_complaints(log, stage))
    for pattern in UNREAD:
        for file in site.rglob(pattern):
            file.unlink()
    return site


def _complaints(log: Path, stage: Path) -> list[str]:
    """Sphinx's warnings, with paths that a reader knows, or its last lines."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", log.read_text(encoding="utf-8", errors="replace"))
    lines = text.replace(f"{stage}/", "book/").splitlines()
    wanted = [line for line in lines if "WARNING" in line or "ERROR" in line] or lines[-10:]
    return [f"the site was not built (full log: {log}):", *dict.fromkeys(wanted)]
