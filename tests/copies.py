"""Processes that start in a moment: copies of one that has imported the library and Dask, as
kernels of a book are.
"""

import os
import sys
from multiprocessing.context import ForkServerContext, ForkServerProcess
from types import ModuleType

from analysis_book.build.kernels import IMPORTED, start_server

DASK = [
    "analysis_lib.measurement.execution",
    "distributed.cli.dask_scheduler",
    "distributed.cli.dask_worker",
]


class Copy(ForkServerProcess):
    """A process with the environment of the one that starts it."""

    def __init__(self, *given: object, **more: object):
        super().__init__(*given, **more)
        self.environment = {**os.environ}

    def start(self) -> None:
        """It does not run the tests' script again to import it, as joblib's processes do not."""
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            super().start()
        finally:
            sys.modules["__main__"] = main

    def run(self) -> None:
        os.environ.clear()
        os.environ |= self.environment
        super().run()


class _Context(ForkServerContext):
    Process = Copy


def context(_method: str = "forkserver") -> ForkServerContext:
    """What multiprocessing starts such processes with."""
    start_server([*IMPORTED, *DASK])
    return _Context()


def start_dask(*arguments: str) -> Copy:
    """``dask`` with such arguments; what it says is not heard."""
    process = context().Process(target=_dask, args=arguments)
    process.start()
    return process


def _dask(*arguments: str) -> None:
    from dask.cli import run_cli

    # Like one that was started elsewhere, it finds no module of the tests.
    sys.path[:] = [
        folder for folder in sys.path if not folder.startswith(os.path.dirname(__file__))
    ]
    silent = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(silent, stream)
    sys.argv = ["dask", *arguments]
    run_cli()
