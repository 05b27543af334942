"""Other processes of this machine that work for this one."""

import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context, parent_process
from types import ModuleType

import torch
from tqdm import tqdm

from analysis_lib.errors import AnalysisError, undisturbed


@contextmanager
def mapped(workers: int) -> Iterator[Callable]:
    """``map`` of a function of this library, in processes of one thread each if there are to be several."""
    if workers < 2:
        yield map
        return
    try:
        with pool(workers, threads=1) as executor:

            def submitted(function: Callable, *given: Iterable) -> Iterator:
                # The executor's own map would cancel what is left, of which the executor complains in a traceback.
                tasks = [*map(partial(executor.submit, function), *given)]
                return (task.result() for task in tasks)

            yield submitted
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
        with undisturbed(), _patient_threads(), _without_script():
            for _ in range(workers):
                executor.submit(int)
        yield executor
    finally:
        # Without this, an interrupted run would wait for work that nobody wants any more.
        for process in list((executor._processes or {}).values()):
            process.terminate()
        # One that was stopped in the middle of a result leaves its reader waiting for the rest while there is a sender.
        executor._result_queue._writer.close()
        executor.shutdown(wait=False, cancel_futures=True)


@contextmanager
def _patient_threads() -> Iterator[None]:
    """Processes that are started here let idle OpenMP threads sleep, which would spin, and keep the cores busy."""
    given = os.environ.get("OMP_WAIT_POLICY")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        yield
    finally:
        if given is None:
            del os.environ["OMP_WAIT_POLICY"]


@contextmanager
def _without_script() -> Iterator[None]:
    """Processes that are started here do not run the script again to import it."""
    # Without its `if __name__ == "__main__":`, it would start processes of its own. Its metrics are sent by value.
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Inside it, PyTorch computes with so many threads: their number decides the order of its sums."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _start(threads: int) -> None:
    torch.set_num_threads(threads)
    end_with_parent()


def end_with_parent() -> None:
    """Let a process of multiprocessing end when the one that started it does, even if that one is killed."""
    # It may be stopped at any time. No bar is shared with other processes; the lock for that would be left behind.
    tqdm.set_lock(threading.RLock())

    def wait() -> None:
        parent_process().join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
