"""Executes one notebook in a process of its own, which ``book.py`` starts and watches.

The job comes as one line of JSON on standard input. Each executed cell is told as a line ``cell``
on standard output; every other line there is a log, and the exit status says whether it went well.
"""

import json
import os
import sys
import threading
import traceback

import papermill


def main() -> None:
    job = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        papermill.execute_notebook(
            job["notebook"],
            job["output"],
            parameters=job["parameters"],
            kernel_name="python3",
            progress_bar=False,
            start_timeout=300,
            # The usual 4 seconds are too few where many notebooks share few cores.
            iopub_timeout=120,
            on_cell_executed=_tell,
        )
    except Exception:
        # The kernel's own traceback is in the output notebook; this one tells of everything else.
        traceback.print_exc(file=sys.stdout)
        sys.exit(1)


def _tell(cell: dict, **_: object) -> None:
    """One line for each cell that the author wrote."""
    if "injected-parameters" not in cell["metadata"].get("tags", []):
        print("cell", flush=True)


def _end_with_parent() -> None:
    """Standard input ends when the parent does, however it dies; the kernel then ends with us."""
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
