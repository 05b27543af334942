"""One notebook run strictly.

Papermill alone is not strict enough to publish from: it accepts a misspelt parameter, and after a
kernel has died it marks cells that never ran as completed. Here a notebook counts as executed only
if every code cell has an execution count and no error output. Only then does the executed copy
replace the previous one.
"""

import asyncio
import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import nbformat
import psutil
from jupyter_client.kernelspec import NATIVE_KERNEL_NAME
from nbclient import NotebookClient
from nbclient.exceptions import DeadKernelError

from analysis_book.build.kernels import folder_for_sockets, kernel_manager
from analysis_book.build.parameters import (
    Parameters,
    complete,
    is_input,
    notebook_parameters,
    parameters_cell,
    read_notebook,
)
from analysis_book.build.watching import watched
from analysis_lib import files
from analysis_lib.errors import AnalysisError, leave_to_asyncio
from analysis_lib.files import inputs_key
from analysis_lib.progress import LINE_FILE

# The tag of the cell that changes parameters.
INJECTED = "injected-parameters"


def run_notebook(notebook: Path, parameters: Parameters, out: Path) -> Path:
    """Execute ``notebook`` with ``parameters`` in the current folder; the copy is ``out``.

    An executed copy of the same notebook, on the same models and data, is replaced, unless it has
    been changed.

    Raises:
        AnalysisError: an unknown parameter, a value of another type, or something else where
            ``out`` is; or a run that did not finish: ``out`` is then left as it was, and what was
            executed lies beside it, as ``NAME.failed.ipynb``.
    """
    failed = out.with_suffix(".failed.ipynb")
    final = complete(parameters, notebook_parameters(notebook), str(notebook))
    for path in (out, failed):
        _refuse_foreign(path, notebook, final)
    written = carried_out(_watched(notebook, parameters, out, failed))
    failed.unlink(missing_ok=True)
    return written


async def _watched(notebook: Path, parameters: Parameters, out: Path, failed: Path) -> Path:
    """``execute``, and what is shown of it."""
    cells = sum(cell.cell_type == "code" for cell in read_notebook(notebook).cells)
    async with watched([notebook.stem], cells, 1) as watch:
        line_file = watch.begin(notebook.stem)
        shown = {"on_cell": watch.cell_ends, "line_file": line_file}
        return await execute(notebook, parameters, out, failed=failed, **shown)


def carried_out(work: Coroutine) -> Any:
    """The result of a coroutine, of which a Ctrl-C cancels what is under way."""
    leave_to_asyncio()
    return asyncio.run(work)


async def execute(
    notebook: Path,
    parameters: Parameters,
    out: Path,
    key: str = "",
    threads: int | None = None,
    on_cell: Callable[[], object] = lambda: None,
    line_file: Path | None = None,
    failed: Path | None = None,
) -> Path:
    """``run_notebook`` beside others, which share one process; each has a kernel of its own.

    Args:
        key: kept in the copy, so that :func:`build_book` can tell whether it is up to date.
        threads: cores that the kernel uses; all unless given.
        on_cell: called after each code cell of the notebook, but not after the one that changes its
            parameters.
        line_file: where the line of a bar that runs inside a cell is kept.
        failed: where to write what was executed of a notebook that fails.
    """
    spec = notebook_parameters(notebook)
    final = complete(parameters, spec, str(notebook))
    if out.is_dir() or (out.exists() and out.samefile(notebook)):
        raise AnalysisError(f"the executed copy would replace {out}: give another --out")
    started = time.monotonic()
    changed = {name: value for name, value in final.items() if value != spec[name].default}
    copy = _parameterized(notebook, changed)
    record = {
        "parameters": final,
        "changed": [*changed],
        "notebook": inputs_key([str(notebook)], out.parent),
    }
    copy.metadata["analysis_lib"] = record
    with files.writing(out.parent):
        out.parent.mkdir(parents=True, exist_ok=True)
    with (
        files.writing(out.parent),
        files.scratch(out.parent, ".unfinished") as scratch,
        tempfile.TemporaryDirectory(dir=folder_for_sockets()) as sockets,
    ):
        begun, error, busy = await _run(
            copy, str(scratch), sockets, threads or cores(), on_cell, line_file
        )
        unfinished = [cell for cell in copy.cells if not _executed(cell)]
        if error or unfinished:
            if failed:
                _write(copy, failed)
            wrong = begun if error else unfinished[0]
            raise AnalysisError(*_complaint(notebook, final, copy, wrong, error))
        copy.metadata["analysis_lib"] |= {
            "key": key,
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": round(time.monotonic() - started, 1),
            "cpu_seconds": round(busy, 1),
        }
        _write(copy, out)
    return out


def _write(notebook: nbformat.NotebookNode, out: Path) -> None:
    """Write a notebook whole or not at all, with the hash of its cells."""
    written = nbformat.reads(nbformat.writes(notebook), 4)
    notebook.metadata["analysis_lib"]["sha256"] = _content_hash(written)
    files.write(out, lambda path: nbformat.write(notebook, path))


def _content_hash(notebook: nbformat.NotebookNode) -> str:
    """The SHA-256 of what a reader sees of a notebook: the text of its cells, and their outputs."""
    cells = [[cell.cell_type, cell.source, cell.get("outputs", [])] for cell in notebook.cells]
    return hashlib.sha256(json.dumps(cells, sort_keys=True).encode()).hexdigest()


def _refuse_foreign(path: Path, notebook: Path, parameters: Parameters) -> None:
    """Refuse to replace all but an unchanged copy of the same notebook, models and data."""
    if not path.is_file() or path.samefile(notebook):
        return
    try:
        copy = read_notebook(path)
        sealed = copy.metadata.get("analysis_lib", {})
    except AnalysisError:
        copy, sealed = None, {}
    if "sha256" not in sealed:
        raise AnalysisError(
            f"{path} is no executed copy of a notebook: move it, or give another --out"
        )
    if sealed["sha256"] != _content_hash(copy):
        raise AnalysisError(
            f"{path} has been changed since it was executed: move it, or give another --out"
        )
    if sealed["notebook"] != inputs_key([str(notebook)], path.parent):
        raise AnalysisError(f"{path} is the executed copy of another notebook: give another --out")
    for name, value in sealed["parameters"].items():
        if is_input(name) and parameters.get(name, value) != value:
            raise AnalysisError(f"{path} was executed with {name} = {value!r}: give another --out")


def _parameterized(notebook: Path, changed: Parameters) -> nbformat.NotebookNode:
    """The notebook without outputs, and with a cell after its parameters that changes some."""
    copy = read_notebook(notebook)
    for cell in copy.cells:
        if cell.cell_type == "code":
            cell.execution_count = None
            cell.outputs = []
    if changed:
        index = copy.cells.index(parameters_cell(copy))
        copy.cells.insert(index + 1, injected_cell(changed))
    return copy


def injected_cell(changed: Parameters) -> nbformat.NotebookNode:
    """The cell that changes parameters."""
    # Imported here: papermill takes a second, which a build with nothing to execute need not wait
    # for.
    from papermill.translators import translate_parameters

    source = translate_parameters(NATIVE_KERNEL_NAME, "python", changed, "Parameters")
    return nbformat.v4.new_code_cell(source, metadata={"tags": [INJECTED]})


async def _run(
    notebook: nbformat.NotebookNode,
    scratch: str,
    sockets: str,
    threads: int,
    on_cell: Callable[[], object],
    line_file: Path | None,
) -> tuple[nbformat.NotebookNode | None, Exception | None, float]:
    """Run the cells.

    Returns:
        The last cell that was begun, the error that ended the run early, and the seconds of the
        processor.
    """
    begun = None
    failure = None
    busy = 0.0
    environment = {LINE_FILE: str(line_file)} if line_file else {}
    manager = kernel_manager(scratch, sockets, threads, environment)
    # The usual 4 seconds for iopub are too few where many notebooks share few cores.
    client = NotebookClient(
        notebook, manager, startup_timeout=300, iopub_timeout=120, raise_on_iopub_timeout=True
    )
    try:
        await client.async_start_new_kernel()
        await client.async_start_new_kernel_client()
        for index, cell in enumerate(notebook.cells):
            if cell.cell_type == "code":
                begun = cell
                await client.async_execute_cell(cell, index)
                if not _injected(cell):
                    on_cell()
    except Exception as error:
        if asyncio.current_task().cancelling():
            # nbclient takes whatever cancels a cell for the death of its kernel.
            raise asyncio.CancelledError from error
        failure = error
    finally:
        if client.kc:
            client.kc.stop_channels()
        if manager.has_kernel:
            with suppress(psutil.NoSuchProcess):
                busy = sum(psutil.Process(manager.provisioner.pid).cpu_times()[:4])
            await manager.shutdown_kernel(now=True)
    return begun, failure, busy


def _injected(cell: nbformat.NotebookNode) -> bool:
    return INJECTED in cell.metadata.get("tags", [])


def _executed(cell: nbformat.NotebookNode) -> bool:
    if cell.cell_type != "code" or not cell.source.strip():
        return True
    return cell.execution_count is not None and not _traceback(cell)


def _traceback(cell: nbformat.NotebookNode) -> list[str]:
    text = "\n".join(line for output in cell.outputs for line in output.get("traceback", []))
    uncoloured = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return [line.rstrip() for line in uncoloured.splitlines() if line.strip()]


def _complaint(
    notebook: Path,
    parameters: Parameters,
    copy: nbformat.NotebookNode,
    cell: nbformat.NotebookNode | None,
    error: Exception | None,
) -> list[str]:
    """The lines by which a reader finds an error: cell, parameters and end of the traceback."""
    where = "failed before its first cell"
    tail = []
    if cell:
        authored = [other for other in copy.cells if not _injected(other)]
        number = next((n for n, other in enumerate(authored, 1) if other is cell), 0)
        first_line = cell.source.strip().partition("\n")[0]
        where = f"failed in cell {number}: {first_line}"
        tail = _traceback(cell)
    values = ", ".join(f"{name} = {value!r}" for name, value in parameters.items())
    given = f"parameters: {values or 'none'}"
    if not cell or isinstance(error, DeadKernelError):
        reason = str(error).partition("\n")[0] or type(error).__name__
        remedy = "free some memory or disk space, or mend the cell, and run again"
        return [f"{notebook} {where}; {given}; {reason}: {remedy}"]
    tail = tail or str(error or "it was not executed").splitlines()
    details = [given, *tail[-6:]]
    return [f"{notebook} {where}", *(f"  {line}" for line in details)]


def cores() -> int:
    """The number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
