"""One notebook run strictly, in a process of its own.

Papermill alone is not strict enough to publish from: it accepts a misspelt parameter, and after a
kernel has died it marks cells that never ran as completed. Here a notebook counts as executed only
if papermill ended well and every code cell has an execution count and no error output. Only then
does the executed copy replace the previous one.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import nbformat

from analysis_lib.book.parameters import Parameters, complete, notebook_parameters, read_notebook
from analysis_lib.errors import AnalysisError

THREAD_LIMITS = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "RAYON_NUM_THREADS",
)


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

    The kernel is this interpreter, works in the current folder and uses ``threads`` cores (by
    default all). ``on_cell`` is called after each code cell; setting ``stop`` ends the run.
    ``key`` is kept in the copy, so that :func:`build_book` can tell whether it is up to date.

    Raises:
        AnalysisError: an unknown parameter, a value of another type, or a run that did not finish;
            ``out`` is then left as it was.
    """
    spec = notebook_parameters(notebook)
    final = complete(parameters, spec, str(notebook))
    changed = {name: value for name, value in final.items() if value != spec[name].default}
    if out.is_dir() or (out.exists() and out.samefile(notebook)):
        raise AnalysisError(f"the executed copy would replace {out}: give another --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".unfinished-") as scratch:
        draft = Path(scratch) / out.name
        job = {"notebook": str(notebook), "output": str(draft), "parameters": changed}
        status, log = _work(job, Path(scratch), threads or cores(), on_cell, stop)
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
    """Run the worker to its end; return its exit status and the last lines of its log."""
    environment = os.environ | dict.fromkeys(THREAD_LIMITS, str(threads))
    environment["JUPYTER_PATH"] = str(_kernelspec(scratch))
    # An executed notebook needs no widgets, and the warning that they are missing would show our paths.
    environment["PYTHONWARNINGS"] = "ignore:IProgress not found"
    # The user's own configuration must not enter a result, and a run must leave nothing behind.
    environment |= dict.fromkeys(("IPYTHONDIR", "JUPYTER_RUNTIME_DIR"), str(scratch))
    log: deque[str] = deque(maxlen=40)
    process = subprocess.Popen(
        # -P keeps the folder of the script out of the path, where our modules would hide others.
        [sys.executable, "-P", str(Path(__file__).with_name("worker.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        # Libraries may write any bytes to their log.
        errors="replace",
        env=environment,
        # Ctrl-C must reach this process only, which then ends the worker.
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
    """A Jupyter data folder whose kernel ``python3`` is this interpreter, even if others are installed."""
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
    """End the worker if it still runs; its kernel notices within a second and ends too."""
    process.kill()
    process.wait()
    process.stdin.close()


def _refuse_unfinished(notebook: Path, parameters: Parameters, draft: Path, status: int, log: list[str]) -> None:
    """Raise, with what a reader needs to find the error, unless every code cell was executed."""
    cells = [cell for cell in read_notebook(draft).cells if _authored(cell)] if draft.exists() else []
    bad = [(n, cell) for n, cell in enumerate(cells, 1) if not _executed(cell)]
    if status == 0 and cells and not bad:
        return
    number, cell = _culprit(cells, bad)
    where = f"cell {number}: {_first_line(cell)}" if cell else "before its first cell"
    traceback = _traceback(cell) if cell else []
    tail = traceback or [line for line in log if line.strip() and status] or ["it was not executed"]
    values = ", ".join(f"{name} = {value!r}" for name, value in parameters.items())
    raise AnalysisError(
        "\n".join(
            [
                f"{notebook} failed in {where}",
                f"  parameters: {values or 'none'}",
                *(f"  {line}" for line in tail[-6:]),
            ]
        )
    )


def _authored(cell: nbformat.NotebookNode) -> bool:
    """Whether the author wrote the cell: papermill adds cells for parameters and to mark errors."""
    added = {"injected-parameters", "papermill-error-cell-tag"}
    return not added & set(cell.metadata.get("tags", []))


def _executed(cell: nbformat.NotebookNode) -> bool:
    if cell.cell_type != "code" or not cell.source.strip():
        return True
    return cell.execution_count is not None and not _errors(cell)


def _errors(cell: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [output for output in cell.outputs if output.output_type == "error"]


def _culprit(cells: list, bad: list) -> tuple[int, nbformat.NotebookNode | None]:
    """The cell with an error; else the last one that began, if its kernel died; else one that never ran."""
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
    """Record in the copy how it was made, and take out the paths of the machine."""
    notebook = read_notebook(draft)
    papermill = notebook.metadata.pop("papermill", {})
    notebook.metadata["analysis_lib"] = {
        "key": key,
        "parameters": dict(parameters),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(papermill.get("duration") or 0.0, 1),
    }
    nbformat.write(notebook, draft)


def cores() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
