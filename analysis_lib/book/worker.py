"""The process that executes one notebook: ``notebook.py`` starts it and watches it.

The job is one line of JSON on standard input. Each executed cell is reported as a line ``cell`` on
standard output; all other lines there are a log. The exit status is 0 if papermill ended well.
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
            on_cell_executed=_report,
        )
    except Exception:
        # The kernel's own traceback is in the output notebook; this one is of everything else.
        traceback.print_exc(file=sys.stdout)
        sys.exit(1)


def _report(cell: dict, **_: object) -> None:
    """Print a line for each cell that the author wrote."""
    if "injected-parameters" not in cell["metadata"].get("tags", []):
        print("cell", flush=True)


def _end_with_parent() -> None:
    """Exit when standard input ends, as it does however the parent dies; the kernel then ends with this process."""
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
