"""Other processes of this machine that work for this one."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from types import ModuleType

import torch
from tqdm import tqdm

from analysis_lib.errors import AnalysisError


@contextmanager
def mapped(workers: int) -> Iterator[Callable]:
    """``map`` of a function of this library, in processes of one thread each if there are to be several."""
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
        with _quiet_starts(), _without_script():
            for _ in range(workers):
                executor.submit(int)
        yield executor
    finally:
        # Without this, an interrupted run would wait for work that nobody wants any more.
        for process in list((executor._processes or {}).values()):
            process.terminate()
        executor.shutdown(wait=False, cancel_futures=True)


@contextmanager
def _quiet_starts() -> Iterator[None]:
    """Processes that are started here never get a Ctrl-C, and let idle OpenMP threads sleep."""
    # A Ctrl-C would break into their imports with a traceback; idle threads would spin, and keep the cores busy.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    given = os.environ.get("OMP_WAIT_POLICY")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
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
