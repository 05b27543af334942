"""Other processes of this machine that work for this one."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context, parent_process

import torch

from analysis_lib.errors import AnalysisError


@contextmanager
def mapped(workers: int) -> Iterator[Callable]:
    """``map``, in processes of one thread each if there are to be several.

    Raises:
        AnalysisError: a process died.
    """
    if workers < 2:
        yield map
        return
    try:
        with pool(workers, threads=1) as executor:
            yield executor.map
    except BrokenProcessPool:
        raise AnalysisError(
            "a worker died (out of memory?): use fewer workers; the same call resumes what was left unfinished"
        ) from None


@contextmanager
def pool(workers: int, threads: int) -> Iterator[futures.ProcessPoolExecutor]:
    """Processes with so many threads each; they are stopped when the block is left, and when this process ends.

    Together they may have more threads than there are cores: idle threads sleep, so that they only take turns.
    """
    executor = futures.ProcessPoolExecutor(workers, get_context("spawn"), _start, (threads,))
    try:
        with _without_interrupts(), _passive_threads():
            for _ in range(workers):
                executor.submit(int)
        yield executor
    finally:
        # Without this, an interrupted run would wait for work that nobody wants any more.
        for process in list((executor._processes or {}).values()):
            process.terminate()
        executor.shutdown(wait=False, cancel_futures=True)


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Processes that are started here never get a Ctrl-C, which would break into their imports with a traceback."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _passive_threads() -> Iterator[None]:
    """Processes that are started here let idle OpenMP threads sleep; otherwise they spin, and keep the cores busy."""
    if "OMP_WAIT_POLICY" in os.environ:
        yield
        return
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    try:
        yield
    finally:
        del os.environ["OMP_WAIT_POLICY"]


def _start(threads: int) -> None:
    """Set up a worker: its threads, and an end when its parent ends."""
    torch.set_num_threads(threads)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent_process().join()
    os._exit(1)
