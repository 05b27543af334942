"""Processes that start in a moment: copies of one that has imported the library and Dask, as the kernels of a book are.

What is set in the environment after the first of them is not set in them.
"""

import multiprocessing
import os
import sys
from multiprocessing import forkserver
from unittest import mock

from analysis_lib.book.kernels import IMPORTED, SETTINGS, _Process
from analysis_lib.errors import undisturbed

DASK = ["analysis_lib.measurement.execution", "distributed.cli.dask_scheduler", "distributed.cli.dask_worker"]


def context(_method: str = "forkserver") -> multiprocessing.context.BaseContext:
    """What multiprocessing starts such processes with."""
    forkserver.set_forkserver_preload([*IMPORTED, *DASK])
    with mock.patch.dict(os.environ, SETTINGS), undisturbed():
        forkserver.ensure_running()
    return multiprocessing.get_context("forkserver")


def start_dask(*arguments: str) -> _Process:
    """``dask`` with such arguments; what it says is not heard."""
    context()
    process = _Process(target=_dask, args=arguments)
    process.start()
    return process


def _dask(*arguments: str) -> None:
    from dask.cli import run_cli

    # Like one that was started elsewhere, it finds no module of the tests.
    sys.path[:] = [folder for folder in sys.path if not folder.startswith(os.path.dirname(__file__))]
    silent = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(silent, stream)
    sys.argv = ["dask", *arguments]
    run_cli()
